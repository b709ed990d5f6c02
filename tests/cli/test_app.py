# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The command line as a whole: help, version, start-up, errors."""

import os
import subprocess
import sys
import time

import pytest

from sparkgap.version import __version__

COMMANDS = ("generate", "inspect", "doctor", "train", "export-target", "bench")


def test_version(run):
    assert run("--version").out == f"sparkgap {__version__}\n"


def test_no_arguments_show_the_help(run):
    assert "Usage" in run().out + run().err


def test_help_names_every_command(run):
    said = run("--help").out
    for command in COMMANDS:
        assert command in said


@pytest.mark.parametrize("command", [*COMMANDS, "bench generate"])
def test_every_command_has_help_and_json(run, command):
    result = run(*command.split(), "--help")
    assert result.code == 0
    if command != "bench":
        assert "--json" in result.out


def test_help_needs_nothing_heavy():
    code = (
        "import sys, sparkgap.cli\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'gguf', 'triton', 'vllm'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_answers_at_once():
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from sparkgap.cli import main; main()", "--help"],
        capture_output=True,
        check=True,
        env=os.environ,
    )
    assert time.perf_counter() - started < 1.5  # 0.3 s; the rest is a busy machine


def test_an_os_error_without_a_path_is_a_defect(run, monkeypatch):
    def broken():
        raise OSError("no file in this one")

    monkeypatch.setattr("sparkgap.cli.loading.shipped_draft", broken)
    with pytest.raises(OSError, match="no file in this one"):
        run("generate", "x")


def test_an_os_error_with_a_path_is_bad_input(run, monkeypatch):
    def unreadable():
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr("sparkgap.cli.loading.shipped_draft", unreadable)
    result = run("generate", "x")
    assert result.code == 2
    assert "/secret: Permission denied" in result.err
