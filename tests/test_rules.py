# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Rules of the tree that linters do not know: sizes, docstrings, bans, words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sparkgap"

MODULE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8

HEADER = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright the Sparkgap authors\n"
)
TEXT = {".md", ".py", ".toml", ".txt", ".yaml", ".json", ""}
# Written by tools, or not ours to word.
SKIPPED = {".git", ".dev", "dist", "build", "out", "__pycache__", "LICENSE"}

# Code that runs what a file says.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def is_command(name: str, function: Function) -> bool:
    """A command of the command line: its parameters are its options."""
    return "/cli/" in name and "typer." in ast.unparse(function.args)


def too_large(name: str, source: str) -> list[str]:
    problems = []
    lines = source.count("\n")
    if lines > MODULE_LINES:
        problems.append(f"{name} has {lines} lines, at most {MODULE_LINES}")
    for function in functions(ast.parse(source)):
        command = is_command(name, function)
        first = function.body[0].lineno if command else function.lineno
        length = (function.end_lineno or first) - first + 1
        if length > FUNCTION_LINES:
            problems.append(
                f"{name}: {function.name} has {length} lines, at most {FUNCTION_LINES}"
            )
        arguments = function.args.posonlyargs + function.args.args
        count = len(arguments) + len(function.args.kwonlyargs)
        count -= bool(arguments) and arguments[0].arg in {"self", "cls"}
        if count > PARAMETERS and not command:
            problems.append(
                f"{name}: {function.name} has {count} parameters, at most {PARAMETERS}"
            )
    return problems


def undocumented(name: str, tree: ast.Module) -> list[str]:
    return [] if ast.get_docstring(tree) else [f"{name} has no docstring"]


def banned(name: str, tree: ast.Module) -> list[str]:
    """Validation by assert, and reading that runs code out of a file."""
    problems = []
    for node in ast.walk(tree):
        what = ""
        if isinstance(node, ast.Assert):
            what = "assert: vanishes under -O, raise an error of errors.py"
        elif isinstance(node, ast.Import):
            what = ", ".join(a.name for a in node.names if a.name in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES:
            what = node.module
        elif isinstance(node, ast.Call):
            what = _unsafe_call(node)
        if what:
            problems.append(f"{name}:{node.lineno}: {what}")
    return problems


def _unsafe_call(call: ast.Call) -> str:
    called = ast.unparse(call.func)
    for keyword in call.keywords:
        value = getattr(keyword.value, "value", None)
        if keyword.arg == "trust_remote_code" and value is not False:
            return "trust_remote_code"
    if called in UNSAFE_CALLS or called == "torch.load":
        return called
    return ""


# Of the place where something was made, not of the thing. Classes of one letter keep
# these lines from matching themselves.
PRIVATE = [
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.])/(?:wor[k]|roo[t]|op[t])/[\w.]+",
        r"(?<![\w.])/(?:hom[e]|User[s])/\w+",
        r"(?<![\w.])/tm[p]/\w/",
        r"\b(?:another|this|later|earlier|next|other) sessio[n]s?\b",
        r"\bsub-?agen[t]s?\b",
    )
]


def private(name: str, text: str) -> list[str]:
    return [
        f"{name}: {match.group()}"
        for pattern in PRIVATE
        for match in pattern.finditer(text)
    ]


def texts(root: Path) -> Iterator[Path]:
    """Text files of the tree; hidden folders are those of tools, but for .ci."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        hidden = any(p.startswith(".") and p != ".ci" for p in parts[:-1])
        if hidden or SKIPPED & set(parts) or not path.is_file():
            continue
        if path.suffix in TEXT:
            yield path


SOURCES = sorted(SOURCE.rglob("*.py"))
ALL_PYTHON = SOURCES + sorted((ROOT / "tests").rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_source_module(path):
    source = path.read_text()
    name, tree = label(path), ast.parse(source)
    assert too_large(name, source) + undocumented(name, tree) + banned(name, tree) == []


@pytest.mark.parametrize("path", ALL_PYTHON, ids=label)
def test_header(path):
    assert path.read_text().startswith(HEADER)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=label)
def test_tests_say_what_they_test(path):
    assert undocumented(label(path), ast.parse(path.read_text())) == []


def test_nothing_tells_where_it_was_made():
    found = [
        line for path in texts(ROOT) for line in private(label(path), path.read_text())
    ]
    assert found == []


def test_size_checks_complain():
    long = "def long():\n" + "    x = 1\n" * FUNCTION_LINES
    wide = "def wide(a, b, c, d, e, f, g, h, i): ...\n"
    just = "class A:\n    def just(self, a, b, c, d, e, f, g, h): ...\n"
    assert too_large("m", just) == []
    assert too_large("m", long + wide) == [
        "m: long has 61 lines, at most 60",
        "m: wide has 9 parameters, at most 8",
    ]
    assert too_large("m", "\n" * 401) == ["m has 401 lines, at most 400"]
    assert undocumented("m", ast.parse("x = 1")) == ["m has no docstring"]
    command = ", ".join(
        f"{letter}: Annotated[int, typer.Option()]" for letter in "abcdefghi"
    )
    assert len(too_large("src/model.py", f"def f({command}): ...\n")) == 1
    assert too_large("src/cli/f.py", f"def f({command}): ...\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "assert x > 0",
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "eval(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=chosen)",
    ],
)
def test_ban_complains(line):
    assert len(banned("m", ast.parse(line))) == 1


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "json.load(f)", "load(x, trust_remote_code=False)", "import json"],
)
def test_ban_lets_pass(line):
    assert banned("m", ast.parse(line)) == []


@pytest.mark.parametrize(
    "halves",
    [
        ("see /wo", "rk/shared/notes.md"),
        ("in /ro", "ot/.cache"),
        ("/ho", "me/someone/x"),
        ("written to /tm", "p/w/out"),
        ("found in an earlier sess", "ion"),
    ],
)
def test_word_check_complains(halves):
    assert len(private("m", "".join(halves))) == 1


def test_word_check_lets_pass():
    assert (
        private("m", 'scope="session"; docs/work/x; ~/.cache; https://a.b/home/x') == []
    )
