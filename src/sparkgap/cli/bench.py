# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap bench: measurements that reproduce themselves.

bench generate   speculative decoding against plain decoding and transformers
"""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.console import Report, out, print_json, table, working
from sparkgap.cli.loading import Pair
from sparkgap.cli.options import (
    DraftOption,
    DType,
    DTypeOption,
    JsonFlag,
    LimitOption,
    Method,
    MethodOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    check_sampling,
)
from sparkgap.errors import InputError

if TYPE_CHECKING:
    from sparkgap.bench.generate import Row, Settings, Spread, Summary
    from sparkgap.speculate.target import Target

bench = typer.Typer(no_args_is_help=True, help="Measure it on this machine.")


@bench.callback()
def _group() -> None:
    """A callback keeps `generate` a subcommand while it is the only one."""


@bench.command()
def generate(  # noqa: PLR0913, PLR0917 (parameters are options)
    prompts: Annotated[
        int, typer.Option(help="Held-out prompts, of eight kinds in turn.")
    ] = 48,
    target: TargetOption = "default",
    draft: DraftOption = None,
    dtype: DTypeOption = DType.float32,
    temperature: TemperatureOption = 0.0,
    max_new_tokens: LimitOption = 128,
    seed: SeedOption = 0,
    method: MethodOption = Method.block,
    file: Annotated[
        Path | None, typer.Option("--out", help="A file to write the JSON to.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Same text? How many tokens a round? How much faster?

    Each prompt is continued with the draft, without it, and by transformers'
    generate, in one process and in turning order. About ten minutes on two
    cores for all prompts.

    Exit code 1: greedy and in float32, a text differs by more than a tie.
    """
    from sparkgap.bench.generate import Settings, Summary, held_out

    check_sampling(temperature, seed, max_new_tokens)
    if not 1 <= prompts <= len(held_out()):
        raise InputError(f"--prompts is {prompts}, wanted 1 to {len(held_out())}")
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {max_new_tokens}, wanted 1 or more")
    if file is not None and not file.parent.is_dir():
        raise InputError(f"--out: there is no folder {file.parent}")
    settings = Settings(max_new_tokens, temperature, seed, method.value)
    with working("loading") as report:
        pair = Pair.load(target, draft, dtype, report)
        rows = _measure(pair, dtype, held_out(prompts), settings, report)
    summary = Summary.of(rows, settings.greedy)
    record = _record(target, pair, dtype, settings, summary, rows)
    if file is not None:
        file.write_text(
            json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
    if as_json:
        print_json(record)
    else:
        _show(pair, summary, rows)
    if settings.greedy and dtype is DType.float32 and summary.differing > summary.ties:
        raise typer.Exit(1)


def _measure(
    pair: Pair,
    dtype: DType,
    prompts: list[tuple[str, str]],
    settings: "Settings",
    report: Report,
) -> "list[Row]":
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from sparkgap.bench.generate import Bench
    from sparkgap.speculate.target import Target

    source = pair.target.source

    @functools.cache
    def judge() -> "Target":
        if dtype is DType.float32:
            return pair.target
        return Target.from_pretrained(str(source))

    report("loading the target as transformers does", 0.0)
    logging.disable_progress_bar()  # ours is drawn already
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=dtype.torch).eval()
    templated = bool(pair.target.tokenizer.chat_template)
    ids = [pair.target.encode(prompt, chat=templated) for _, prompt in prompts]
    drafter = pair.drafter(max(map(len, ids)) + settings.max_new_tokens)
    measured = Bench(pair.target, drafter, stock, judge, settings)
    report("warming up", 0.0)
    measured.warm_up(ids[0])
    rows = []
    for index, (kind, prompt) in enumerate(prompts):
        report("measuring", index / len(prompts))
        rows.append(measured.row(index, kind, prompt, ids[index]))
    return rows


def _record(
    target: str,
    pair: Pair,
    dtype: DType,
    settings: "Settings",
    summary: "Summary",
    rows: "list[Row]",
) -> dict[str, Any]:
    from sparkgap.bench.provenance import digest, provenance

    return {
        "provenance": provenance(),
        "target": target,
        "draft": pair.config.name,
        "draft_sha256": digest(pair.draft),
        "dtype": dtype.value,
        "settings": asdict(settings),
        "summary": asdict(summary),
        "rows": [
            asdict(row)
            | {"speed_ratio": row.speed_ratio, "plain_ratio": row.plain_ratio}
            for row in rows
        ],
    }


def _show(pair: Pair, summary: "Summary", rows: "list[Row]") -> None:
    console = out()
    kinds = table("kind", ">accepted length")
    for kind, length in summary.accepted_length_by_kind.items():
        kinds.add_row(kind, f"{length:.2f}")
    kinds.add_row("all", f"{summary.accepted_length:.2f}", style="bold")
    console.print(kinds)
    console.print()
    speeds = table("", ">median", "quartiles", "extremes")
    for way, spread in summary.speeds.items():
        speeds.add_row(f"{way}, tokens/s", *_cells(spread, 1))
    speeds.add_row("speculative / plain", *_cells(summary.speculative_to_plain, 2))
    speeds.add_row("plain / transformers", *_cells(summary.plain_to_transformers, 2))
    console.print(speeds)
    console.print(
        "\nTexts are draws at this temperature and not compared."
        if summary.identical is None
        else f"\n{summary.identical} of {summary.prompts} texts identical to plain "
        f"decoding; plain identical to transformers: {summary.transformers_identical}."
    )
    for row in rows:
        if row.difference is not None:
            console.print(f"  {row.prompt}\n    {_explained(pair, row)}", markup=False)


def _cells(spread: "Spread", digits: int) -> tuple[str, str, str]:
    values = (spread.median, spread.low, spread.high, spread.least, spread.most)
    median, low, high, least, most = (f"{value:.{digits}f}" for value in values)
    return median, f"{low} to {high}", f"{least} to {most}"


def _explained(pair: Pair, row: "Row") -> str:
    d = row.difference
    if d is None:
        return ""
    decode = pair.target.tokenizer.decode
    texts = ["the end" if t is None else repr(decode([t])) for t in (d.plain, d.ours)]
    said = f"step {d.step}: plain says {texts[0]}, speculative {texts[1]}"
    if d.margin is None:
        return said
    tie = ", a tie" if d.is_tie else ""
    return f"{said}; {d.margin:.1e} apart in fp32 logits{tie}"
