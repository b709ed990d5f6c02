# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap generate: text as it comes, drafted tokens marked, then what drafting gave.

With --compare the same target also decodes without a draft: after a warm-up of both,
the drafted run (the one that is shown), then the plain one. Speeds count every token
and all the time of the passes that made them, printing left out.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.console import err, out, print_json, table, working
from sparkgap.cli.loading import Pair
from sparkgap.cli.options import (
    DraftOption,
    DType,
    DTypeOption,
    JsonFlag,
    LimitOption,
    Mark,
    Method,
    MethodOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    check_sampling,
)
from sparkgap.cli.stream import Detokenizer, Token, Writer, stream

if TYPE_CHECKING:
    from sparkgap.bench.generate import Difference
    from sparkgap.drafter import Drafter
    from sparkgap.speculate.generate import Round, Statistics
    from sparkgap.speculate.target import Target

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class _Session:
    """One prompt, ready to be continued."""

    target: "Target"
    drafter: "Drafter"
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    method: Method

    def rounds(self, limit: int | None = None) -> "Iterator[Round]":
        from sparkgap.speculate.generate import generate

        return generate(
            self.target,
            self.drafter,
            self.prompt_ids,
            method=self.method.value,
            **self._common(limit),
        )

    def plain(self, limit: int | None = None) -> Iterator[int]:
        from sparkgap.speculate.generate import decode_plain

        return decode_plain(self.target, self.prompt_ids, **self._common(limit))

    def _common(self, limit: int | None) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens if limit is None else limit,
            "temperature": self.temperature,
            "seed": self.seed,
            "eos_ids": self.target.eos_ids,
        }


@dataclass(frozen=True)
class _Comparison:
    """Plain decoding beside the drafted run; identical None = not to be expected."""

    identical: bool | None
    difference: "Difference | None"
    speed_ratio: float
    plain_tokens_per_second: float


def generate(  # noqa: PLR0913, PLR0917 (parameters are options)
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from stdin.')],
    target: TargetOption = "default",
    draft: DraftOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    max_new_tokens: LimitOption = 256,
    k: Annotated[
        int | None,
        typer.Option(help="Tokens drafted a round.", show_default="all the draft can"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Same text as without the draft? Faster?")
    ] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="A turn of a chat, or a text to continue."),
    ] = True,
    dtype: DTypeOption = DType.float32,
    method: MethodOption = Method.block,
    mark: Annotated[
        Mark,
        typer.Option(
            metavar="HOW",
            help="Drafted tokens in colour, underline, brackets or none; auto: as the "
            "terminal allows, none in a pipe.",
        ),
    ] = Mark.auto,
    as_json: JsonFlag = False,
) -> None:
    """Continue PROMPT, showing which tokens were drafted.

    The text is the target's own, whatever the draft proposes: identical when
    greedy, equally distributed at a temperature.

    Exit code 1: with --compare, greedy and in float32, the texts differ by
    more than a tie.
    """
    check_sampling(temperature, seed, max_new_tokens)
    text = sys.stdin.read() if prompt == "-" else prompt
    with working("loading") as report:
        pair = Pair.load(target, draft, dtype, report)
        ids = pair.target.encode(text, chat=chat)
        drafter = pair.drafter(len(ids) + max_new_tokens, k)
        report("getting ready", 0.0)
        pair.target.prepare(drafter.num_drafts + 1)
        session = _Session(
            pair.target, drafter, ids, max_new_tokens, temperature, seed, method
        )
        session.rounds()  # refuses a prompt that is too long
        if compare:
            _warm_up(session)
    tokens, counts = _decode(session, None if as_json else Writer(out(), mark))
    compared = _compare(session, tokens, counts) if compare else None
    if as_json:
        print_json(_record(tokens, counts, compared))
    else:
        _show(tokens, counts, compared)
    if compared and dtype is DType.float32 and _is_wrong(compared):
        raise typer.Exit(1)


def _decode(
    session: _Session, writer: Writer | None
) -> "tuple[list[Token], Statistics]":
    from sparkgap.speculate.generate import Statistics

    counts = Statistics()
    detokenizer = Detokenizer(session.target.tokenizer, session.prompt_ids)
    return stream(counts.watch(session.rounds()), detokenizer, writer), counts


def _warm_up(session: _Session) -> None:
    for _ in session.rounds(WARM_UP_TOKENS):
        pass
    for _ in session.plain(WARM_UP_TOKENS):
        pass


def _compare(
    session: _Session, tokens: list[Token], counts: "Statistics"
) -> _Comparison:
    from sparkgap.bench.generate import first_difference
    from sparkgap.speculate.verify import GREEDY_BELOW

    with working("decoding without the draft") as report:
        started, plain = time.perf_counter(), []
        for token in session.plain():
            plain.append(token)
            report("decoding without the draft", len(plain) / max(len(tokens), 1))
        seconds = time.perf_counter() - started
        ours = [token.id for token in tokens]
        difference = None
        if session.temperature < GREEDY_BELOW:
            difference = first_difference(
                session.target, session.prompt_ids, ours, plain
            )
    speed = len(plain) / seconds if plain else 0.0
    return _Comparison(
        difference is None if session.temperature < GREEDY_BELOW else None,
        difference,
        counts.tokens_per_second / speed if speed else 0.0,
        speed,
    )


def _is_wrong(compared: _Comparison) -> bool:
    return compared.difference is not None and not compared.difference.is_tie


def _record(
    tokens: list[Token], counts: "Statistics", compared: _Comparison | None
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": "".join(token.text for token in tokens),
        "tokens": [asdict(token) for token in tokens],
        "rounds": counts.rounds,
        "accepted_length": counts.accepted_length,
        "acceptance_by_position": counts.acceptance_by_position,
        "tokens_per_second": counts.tokens_per_second,
    }
    if compared:
        record["identical"] = compared.identical
        record["speed_ratio"] = compared.speed_ratio
    return record


def _show(
    tokens: list[Token], counts: "Statistics", compared: _Comparison | None
) -> None:
    console = err()
    shares = counts.acceptance_by_position
    drafted = sum(token.drafted for token in tokens)
    console.print()
    rows = table("", "")
    rows.add_row("tokens", f"{len(tokens)}, {drafted} of them drafted")
    rows.add_row("rounds", f"{counts.rounds}")
    rows.add_row("accepted length", f"{counts.accepted_length:.2f} tokens a round")
    if shares:
        each = "  ".join(f"{share:.2f}" for share in shares)
        rows.add_row("acceptance", f"{each}   by position")
    rows.add_row("tokens/s", f"{counts.tokens_per_second:.1f}")
    if compared:
        rows.add_row(
            "without the draft",
            f"{compared.plain_tokens_per_second:.1f} tokens/s: "
            f"{compared.speed_ratio:.2f} times as fast with it",
        )
        rows.add_row("the text", _verdict(compared))
    rows.show_header = False
    console.print(rows)


def _verdict(compared: _Comparison) -> str:
    difference = compared.difference
    if compared.identical is None:
        return "another draw of the same distribution (identical only when greedy)"
    if difference is None:
        return "identical"
    where = f"differs from token {difference.step + 1} on"
    if difference.margin is None:
        return f"{where}, where one of the two ends"
    kind = "a tie" if difference.is_tie else "logits of the two tokens there"
    return f"{where}: {kind}, {abs(difference.margin):.1e} apart"
