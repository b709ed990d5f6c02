# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What a Markdown page claims, and the checks that compare claims with the tree.

A page is split into prose (with its `spans` of code and its links) and fenced blocks.
Every check returns its complaints as lines; an empty list is a good page.
"""

import ast
import builtins
import importlib.util
import keyword
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from typer.main import get_command

import sparkgap
from sparkgap.cli import app

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
WORD = re.compile(r"[A-Za-z_][\w.-]*\w|[A-Za-z_]")
# A path has a slash, or ends as a source file does.
PATH = re.compile(r"[\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|txt)|\.[\w/-]+")
# A name standing for one of the user's: TARGET, DIR.
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")

SHELL = {"sh", "bash", "console"}
# Folders that a command makes, files of a checkpoint or an environment, and programs
# whose arguments are not ours to check.
MADE = {".venv", "dist"}
FOREIGN = {"config.json", "model.safetensors", "training.json", ".complete"}
PROGRAMS = {"sparkgap", "make", "pip", "git", "pre-commit"}


@dataclass(frozen=True)
class Page:
    """One Markdown file and the tree it belongs to."""

    path: Path
    text: str
    root: Path

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, source) of every fenced block."""
        return [(m[1], m[2]) for m in FENCE.finditer(self.text)]

    @cached_property
    def prose(self) -> str:
        return FENCE.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        return SPAN.findall(self.prose)

    @property
    def commands(self) -> list[str]:
        """Command lines: those of shell blocks, and spans that start as one does."""
        lines = [
            line.removeprefix("$ ")
            for language, source in self.blocks
            if language in SHELL
            for line in source.replace("\\\n", " ").splitlines()
        ]
        return lines + self.spans


def broken_links(page: Page) -> list[str]:
    problems = []
    for target in LINK.findall(page.prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            problems.append(f"link to {target}: no such file")
        elif anchor and anchor not in anchors(path, page):
            problems.append(f"link to {target}: no such heading")
    return problems


def anchors(path: Path, page: Page) -> set[str]:
    text = page.text if path == page.path else path.read_text()
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


def missing_paths(page: Page) -> list[str]:
    """Paths in spans that are neither in the tree nor beside the page.

    A bare file name may be that of any source file.
    """
    sources = {path.name for path in page.root.glob("src/**/*")}
    found = []
    for word in (word for span in page.spans for word in span.split()):
        if not PATH.fullmatch(word) or word in FOREIGN | sources or made(word):
            continue
        if not any((base / word).exists() for base in (page.root, page.path.parent)):
            found.append(f"path {word}: not in the tree")
    return found


def made(word: str) -> bool:
    return word.partition("/")[0] in MADE


def wrong_commands(page: Page, targets: set[str]) -> list[str]:
    """Commands, options and make targets that do not exist."""
    problems = []
    for line in page.commands:
        words = [w for w in split(line) if not re.fullmatch(r"[A-Z_]+=.*", w, re.S)]
        program = words[0].rpartition("/")[2] if words else ""
        if program == "sparkgap":
            problems += wrong_options(words[1:])
        elif program == "make":
            problems += [
                f"make {word}: no such target"
                for word in words[1:]
                if word not in targets
            ]
    return problems


def split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a span of prose
        return line.split()


def wrong_options(words: list[str]) -> list[str]:
    """Walks the command tree as far as the words name commands, then checks options."""
    command, name = get_command(app), "sparkgap"
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return [f"{name} {words[0]}: no such command"]
        name, command = f"{name} {words[0]}", command.commands[words[0]]
        words = words[1:]
    known = {"--help", "-h"}
    for parameter in command.params:
        known |= set(parameter.opts) | set(parameter.secondary_opts)
    asked = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [
        f"{name} {option}: no such option" for option in asked if option not in known
    ]


def commands(command: Any = None) -> Iterator[Any]:
    """Every command, groups included."""
    command = command or get_command(app)
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def command_names() -> set[str]:
    return {command.name or "" for command in commands()}


def options() -> set[str]:
    """Every option of every command."""
    parameters = [p for command in commands() for p in command.params]
    return {opt for p in parameters for opt in (*p.opts, *p.secondary_opts)} | {
        "--help"
    }


def unknown_words(page: Page, vocabulary: set[str]) -> list[str]:
    """Names in spans that nothing in the tree bears.

    Paths and command lines are for the other checks; an option alone must be one of
    some command's.
    """
    problems = []
    for span in page.spans:
        parts = [word for word in span.split() if not PATH.fullmatch(word)]
        if not parts or parts[0] in PROGRAMS:
            continue
        if parts[0].startswith("-"):
            if parts[0] not in options():
                problems.append(f"option {parts[0]}: no command has it")
            continue
        for word in WORD.findall(" ".join(parts)):
            if not resolves(word):
                problems.append(f"name {word}: not in the public API")
            for part in (word,) if word in vocabulary else word.split("."):
                if part not in vocabulary and not PLACEHOLDER.fullmatch(part):
                    problems.append(f"name {part} (in `{span}`): nowhere in the tree")
    return problems


def resolves(word: str) -> bool:
    """False for a dotted name that starts with a public one and leads nowhere."""
    first, *rest = word.split(".")
    if first == "sparkgap" and rest and rest[0] not in sparkgap.__all__:
        try:
            return importlib.util.find_spec(word) is not None
        except ModuleNotFoundError:
            return False
    if first == "sparkgap" and rest:
        first, *rest = rest
    if first not in sparkgap.__all__ or not rest:
        return True
    found = getattr(sparkgap, first)
    return hasattr(found, rest[0]) or rest[0] in getattr(
        found, "__dataclass_fields__", {}
    )


def vocabulary(root: Path) -> set[str]:
    """Every name of the sources, and every word of the files that configure them."""
    found = set(keyword.kwlist) | set(dir(builtins)) | command_names()
    for path in (*root.glob("src/**/*.py"), *root.glob("models/*/*.py")):
        found |= set(path.relative_to(root).with_suffix("").parts)
        found |= set(names(ast.parse(path.read_text())))
    for path in ("Makefile", "pyproject.toml", "models/pyproject.toml"):
        found |= set(re.findall(r"[\w-]+", (root / path).read_text()))
    for path in root.glob("constraints/*.txt"):
        found |= set(re.findall(r"[\w-]+", path.read_text()))
    return found


def names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant):
            yield from keys(node.value)


def keys(value: object) -> list[str]:
    """A string that is a key or a choice, with its dotted parts; prose is neither."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]+", value):
        return []
    return [value, *value.split(".")]


def python(page: Page) -> str:
    """The page's Python blocks as one program; line numbers are those of the page."""
    lines = [""] * page.text.count("\n")
    for match in FENCE.finditer(page.text):
        if match[1] == "python":
            first = page.text[: match.start(2)].count("\n")
            block = match[2].splitlines()
            lines[first : first + len(block)] = block
    return "\n".join(lines) + "\n"


def newest_version(changelog: str) -> str:
    """The first second-level heading's version."""
    match = re.search(r"^## \[?([^\s\]]+)", changelog, re.M)
    return match[1] if match else ""


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
