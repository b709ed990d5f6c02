# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The errors a user can meet; every one names the value seen, the value wanted and
the way out. The command line turns `InputError` into exit code 2 and one message."""


class SparkgapError(Exception):
    """Base of everything Sparkgap raises on purpose."""


class InputError(SparkgapError, ValueError):
    """Something the user gave cannot be used; nothing was written."""
