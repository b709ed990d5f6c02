# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap export-target: a target as a Hugging Face folder that vLLM loads."""

from pathlib import Path
from typing import Annotated

import typer

from sparkgap.cli.console import out, print_json, working
from sparkgap.cli.options import JsonFlag, TargetOption


def export_target(
    folder: Annotated[
        Path, typer.Argument(help="Where to write; new or empty.", show_default=False)
    ],
    target: TargetOption = "default",
    as_json: JsonFlag = False,
) -> None:
    """Write a target as a Hugging Face folder that vLLM loads with a K3 draft.

    Weights and tokenizer as they are; config.json gains the draft's head
    sizes, which vLLM reads from the target.
    """
    with working("loading") as report:
        report(f"writing {folder}", 0.0)
        from sparkgap.speculate.default_target import default_target
        from sparkgap.speculate.default_target import export_target as export

        if target == "default":
            default_target(report)
            report(f"writing {folder}", 0.0)
        written = export(target, folder)
    size = sum(file.stat().st_size for file in written.iterdir())
    if as_json:
        print_json({"folder": str(written), "bytes": size})
    else:
        out().print(f"{written}: {size / 1e6:.0f} MB", markup=False)
