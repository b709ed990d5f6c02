# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The commands by name, and the one place where errors become exit codes.

Bad input (InputError, or an OSError that names a path) is one message on stderr and
exit code 2; ^C is 130. Anything else is a defect of ours and keeps its traceback.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sparkgap.cli.bench import bench
from sparkgap.cli.console import fail
from sparkgap.cli.doctor import doctor
from sparkgap.cli.export_target import export_target
from sparkgap.cli.generate import generate
from sparkgap.cli.inspect import inspect
from sparkgap.cli.train import train
from sparkgap.errors import InputError
from sparkgap.version import __version__

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """The command group; `invoke` runs the chosen command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            fail(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            fail(f"{error.filename}: {error.strerror}")
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(BAD_INPUT)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparkgap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Draft tokens for speculative decoding, and see that the text stays the target's.

    Start with:  sparkgap generate "Explain why the sky is blue."
    """


app.command()(generate)
app.command()(inspect)
app.command()(doctor)
app.command()(train)
app.command()(export_target)
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `sparkgap` script."""
    app()
