# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap train: a drafter for a target, from nothing but the target.

Every option that shapes the run may be left out; what is then taken depends on where it
runs (`FULL` on a GPU, `QUICK` on a CPU or with --quick).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkgap.cli.console import err, out, print_json, table, working
from sparkgap.cli.options import TARGET_HELP, JsonFlag
from sparkgap.errors import InputError

if TYPE_CHECKING:
    from sparkgap.train.evaluate import Acceptance

_AUTO = "for the device"


@dataclass(frozen=True)
class Size:
    """How much data is made and how long it is trained on."""

    batches: int
    rows: int
    length: int
    steps: int
    sequences: int
    anchors: int
    held_out: int

    def changed(self, **given: int | None) -> "Size":
        """With the values that were given."""
        return replace(self, **{n: v for n, v in given.items() if v is not None})


# What made the shipped drafter on an H200.
FULL = Size(
    batches=10, rows=4096, length=512, steps=7800, sequences=48, anchors=96, held_out=6
)
# Five minutes on two cores, half of them for measuring: enough to see every stage work,
# not to be of use.
QUICK = Size(
    batches=1, rows=32, length=192, steps=60, sequences=2, anchors=16, held_out=1
)

SHORT = (
    "A short run ({steps} steps): it shows every stage and gives a poor drafter. "
    "A good one takes a GPU and about 25 minutes."
)

_DRAFT = "Draft"
_RUN = "Data and run"


def _draft(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=_DRAFT)


def _run(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=_RUN, show_default=_AUTO)


def train(  # noqa: PLR0913, PLR0917 (parameters are options)
    target: Annotated[str, typer.Argument(help=TARGET_HELP, show_default=False)],
    folder: Annotated[
        Path,
        typer.Option("--out", help="Checkpoint folder; the same command continues it."),
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A small run, to see it work: a poor drafter."),
    ] = False,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = 0,
    layers: Annotated[int, _draft("Layers.")] = 3,
    heads: Annotated[int, _draft("Attention heads.")] = 4,
    intermediate: Annotated[int, _draft("Width of the MLP.")] = 1280,
    markov_rank: Annotated[int, _draft("Rank of the Markov head.")] = 32,
    taps: Annotated[int, _draft("Target layers it reads.")] = 5,
    drafts: Annotated[int, _draft("Tokens drafted a round.")] = 7,
    batches: Annotated[int | None, _run("Batches of texts to make.")] = None,
    rows: Annotated[int | None, _run("Texts of a batch, made at once.")] = None,
    length: Annotated[int | None, _run("Tokens of a text.")] = None,
    steps: Annotated[int | None, _run("Optimizer steps.")] = None,
    sequences: Annotated[int | None, _run("Texts a step.")] = None,
    anchors: Annotated[int | None, _run("Places drafted from in a text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter for TARGET on the target's own answers.

    Makes the data, trains, measures the accepted length on held-out prompts
    and writes a checkpoint that `sparkgap generate --draft` loads. Stop it
    and give the same command again: it continues.
    """
    from sparkgap.train.recipe import Geometry

    geometry = Geometry(
        layers=layers,
        heads=heads,
        intermediate=intermediate,
        markov_rank=markov_rank,
        drafts=drafts,
        taps=taps,
    )
    place = _device(device)
    short = quick or place == "cpu"
    size = (QUICK if short else FULL).changed(
        batches=batches,
        rows=rows,
        length=length,
        steps=steps,
        sequences=sequences,
        anchors=anchors,
    )
    _check(vars(geometry) | vars(size))
    if short:
        err().print(SHORT.format(steps=size.steps), soft_wrap=True)
    found = _train(target, folder, place, geometry, size, seed)
    if as_json:
        print_json(_record(folder, size, found))
    else:
        _show(target, folder, found)


def _device(asked: str) -> str:
    import torch

    if asked == "cpu":
        return asked
    if asked not in ("auto", "cuda") and not asked.startswith("cuda:"):
        raise InputError(f"--device is {asked!r}, wanted auto, cpu or cuda")
    if torch.cuda.is_available():
        return "cuda" if asked == "auto" else asked
    if asked == "auto":
        return "cpu"
    raise InputError(
        f"--device is {asked}, but torch {torch.__version__} finds no GPU here; give "
        "--device cpu, or install a torch built for your GPU"
    )


def _check(values: dict[str, Any]) -> None:
    wrong = [
        f"--{name.replace('_', '-')} is {value}"
        for name, value in values.items()
        if value < 1
    ]
    if wrong:
        raise InputError(", ".join(wrong) + ": wanted 1 or more")
    if values["length"] < 64:
        raise InputError(
            f"--length is {values['length']}, wanted 64 or more: a question and the "
            "beginning of an answer must fit"
        )


def _train(
    target: str, folder: Path, device: str, geometry: Any, size: Size, seed: int
) -> "dict[str, Acceptance]":
    with working("loading") as report:
        report(f"loading the target {target}", 0.0)
        import torch

        from sparkgap.speculate.target import Target
        from sparkgap.train.corpus import CorpusPlan
        from sparkgap.train.optimizer import Schedule
        from sparkgap.train.recipe import geometry_for
        from sparkgap.train.recipe import train as run
        from sparkgap.train.trainer import TrainSettings

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded = Target.from_pretrained(
            target, dtype=dtype, device=device, progress=report
        )
        schedule = Schedule(size.steps, warmup=min(100, max(size.steps // 5, 1)))
        return run(
            folder,
            loaded,
            geometry_for(folder.name, loaded, geometry),
            CorpusPlan(size.batches, size.rows, size.length, seed=seed),
            TrainSettings(
                schedule,
                size.sequences,
                size.anchors,
                seed,
                save_every=min(500, max(size.steps // 10, 1)),
                held_out=size.held_out,
            ),
            report,
        )


def _record(folder: Path, size: Size, found: "dict[str, Acceptance]") -> dict[str, Any]:
    return {
        "folder": str(folder),
        "steps": size.steps,
        "bytes": (folder / "model.safetensors").stat().st_size,
        "accepted_length": {name: a.length for name, a in found.items()},
        "acceptance_by_position": {
            name: list(a.by_position) for name, a in found.items()
        },
    }


def _show(target: str, folder: Path, found: "dict[str, Acceptance]") -> None:
    rows = table(
        "held-out prompts", ">accepted length", ">rounds", "kept up to position"
    )
    for name, a in found.items():
        each = "  ".join(f"{share:.2f}" for share in a.by_position)
        rows.add_row(name, f"{a.length:.2f}", f"{a.rounds}", each)
    console = out()
    console.print(rows)
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    console.print(f"\n{folder}: {megabytes:.1f} MB. Try it:", markup=False)
    console.print(
        f'  sparkgap generate "…" --target {target} --draft {folder}', markup=False
    )
