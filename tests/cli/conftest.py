# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The command line, called in this process and as a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from tiny import Tiny, write_draft, write_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    return Tiny(write_target(root / "target"), write_draft(root / "draft"))


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run():
    """Call the command line in this process."""
    from sparkgap.cli import app

    def call(*arguments: object, **options: object) -> Result:
        done = CliRunner().invoke(app, [str(a) for a in arguments], **options)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    return call


@pytest.fixture
def spawn():
    """Call it as a process of its own, as a shell does."""

    def call(*arguments: object, **environment: str) -> Result:
        done = subprocess.run(
            [sys.executable, "-c", "from sparkgap.cli import main; main()"]
            + [str(a) for a in arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call
