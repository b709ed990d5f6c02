# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The command line: one module per command, and four that they share.

    app.py       the commands, and the one place where errors become exit codes
    console.py   where output goes: results to stdout, everything else to stderr
    loading.py   a target and its drafter, the shipped ones by default
    stream.py    tokens → text as it comes, drafted tokens marked

Exit codes: 0 good, 1 a check failed, 2 bad input, 130 interrupted. torch, transformers
and the rest of the package are imported inside the commands, so that `--help` answers
at once.
"""

from sparkgap.cli.app import app, main

__all__ = ["app", "main"]
