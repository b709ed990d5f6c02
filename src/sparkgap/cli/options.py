# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Options that more than one command takes, or that have a fixed set of values."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkgap.errors import InputError

if TYPE_CHECKING:
    import torch


class DType(StrEnum):
    """What target and drafter compute in."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


class Method(StrEnum):
    """How drafts are verified at a temperature above 0."""

    block = "block"
    standard = "standard"


class Mark(StrEnum):
    """How drafted tokens are told from the target's own."""

    auto = "auto"
    colour = "colour"
    underline = "underline"
    brackets = "brackets"
    none = "none"


TARGET_HELP = '"default", a folder, or a model hub name.'

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]
TargetOption = Annotated[str, typer.Option(help=TARGET_HELP)]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the drafter's checkpoint.", show_default="the shipped one"
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option(help="Same seed, same text.")]
LimitOption = Annotated[int, typer.Option(help="Stop after so many.")]
DTypeOption = Annotated[
    DType, typer.Option(help="bfloat16 is faster where the CPU has it.")
]
MethodOption = Annotated[
    Method, typer.Option(help="Verification at a temperature above 0.")
]


def check_sampling(temperature: float, seed: int, max_new_tokens: int) -> None:
    """Everything wrong with these options in one InputError."""
    problems = []
    if not 0 <= temperature < float("inf"):  # NaN is neither
        problems.append(
            f"--temperature is {temperature}, wanted 0 (greedy) or a number above"
        )
    if not 0 <= seed < 2**63:
        problems.append(f"--seed is {seed}, wanted 0 to {2**63 - 1}")
    if max_new_tokens < 0:
        problems.append(f"--max-new-tokens is {max_new_tokens}, wanted 0 or more")
    if problems:
        raise InputError("; ".join(problems))
