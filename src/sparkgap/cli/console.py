# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Where output goes: results to stdout, progress, notes and errors to stderr.

So a pipe receives the text or the JSON and nothing else.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

Report = Callable[[str, float], None]
"""Told what is being done and which share of it is done, 0 to 1."""

# Where there is no terminal to draw a bar on: before the first line of progress, and
# between two lines of one stage.
BRIEF_SECONDS = 2.0
QUIET_SECONDS = 15.0


def out() -> Console:
    """Results. Made at each call: tests and pipes replace sys.stdout."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Progress, notes, errors."""
    return Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """The one message of a run that cannot go on."""
    console = err()
    console.print("sparkgap:", style="bold red", end=" ")
    console.print(message, markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")


def table(*columns: str, title: str | None = None) -> Table:
    """A table without a frame; columns that start with ">" hold numbers."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return made


@contextmanager
def working(what: str) -> Iterator[Report]:
    """Shows what goes on while the block runs; gives the function to report it with.

    A spinner, and a bar as soon as a share is known; without a terminal nothing for two
    seconds, then a line at each new stage and one every 15 s. A stage is the text up to
    the first two spaces.
    """
    console = err()
    if not console.is_terminal:
        yield _line_by_line(console)
        return
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        stage = _stage(what)

        def report(now: str, share: float) -> None:
            nonlocal stage
            if _stage(now) != stage:
                stage = _stage(now)
                bars.reset(task, total=None)
            bars.update(
                task, description=now, total=1.0 if share else None, completed=share
            )

        yield report


def _line_by_line(console: Console) -> Report:
    started = time.monotonic()
    stage, spoken = "", 0.0

    def report(now: str, share: float) -> None:
        nonlocal stage, spoken
        clock = time.monotonic()
        if clock - started < BRIEF_SECONDS:
            return
        if _stage(now) == stage and clock - spoken < QUIET_SECONDS:
            return
        stage, spoken = _stage(now), clock
        done = f" ({share:.0%})" if share else ""
        console.print(f"{now}{done}", markup=False, soft_wrap=True)

    return report


def _stage(text: str) -> str:
    return text.partition("  ")[0]
