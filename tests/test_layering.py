# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The import graph: arrows go down only, and importing stays cheap.

`ALLOWED` is the architecture: a unit (a module or a package right under `sparkgap`) may
import itself, the leaves, and what its row names. Imports inside functions and for
typing count as well, since they are dependencies all the same.
"""

import ast
import graphlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "sparkgap"

# Facts without dependants' knowledge: everybody may use them, they use only `errors`.
LEAVES = {"config", "device", "errors", "version"}

# Modules that are one unit with another: a config, its reader and known ones; weights,
# their files and their shards.
PART_OF = {
    "config_reader": "config",
    "presets": "config",
    "safetensors_file": "weights",
    "sharding": "weights",
    "checkpoint": "weights",
}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "device": set(),
    "config": set(),
    # Maths shared by ops: no op, no parameters.
    "primitives": set(),
    # Parameters by name and shard; knows geometry, not what is computed with it.
    "weights": set(),
    # Rows, blocks and slots; does not know who attends them.
    "kv_cache": set(),
    # An op takes tensors; `weights` for the bundles of tensors that heads are given as.
    "ops": {"primitives", "weights"},
    # The model is written over the ops alone, and borrows cache and parameters.
    "model": {"ops", "primitives", "weights", "kv_cache"},
    # Chooses among implementations; never runs one.
    "plan": {"ops"},
    "drafter": {"model", "ops", "primitives", "weights", "kv_cache"},
    # Tolerances: numbers with their derivation, which tests and commands compare by.
    "verify": set(),
    # The engine-free loop sees a drafter, never the model behind it.
    "speculate": {"drafter", "primitives"},
    # Measures the loop; counts a step's bytes by the shapes of its weights.
    "bench": {"speculate", "drafter", "weights"},
    # Trains `model` itself; data come from a target, the held-out prompts from bench.
    "train": {"speculate", "bench.prompts", "model", "ops", "weights"},
    # Words, tables and exit codes around all of it.
    "cli": {"bench", "train", "speculate", "drafter", "plan", "weights"},
    # The public names, imported when first used.
    "": {"drafter", "model"},
}

# A definition must run wherever torch does; the rest is the standard library.
REFERENCE_MAY_IMPORT = {"torch", "sparkgap"} | set(sys.stdlib_module_names)
HEAVY = ("torch", "triton", "transformers", "vllm", "cuda", "numpy")


def modules(folder: Path) -> dict[str, ast.Module]:
    """Dotted name under the package ("" is the package itself) → parsed source."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module or name imported, as written; relative ones keep their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def unit_of(name: str) -> str:
    first = name.partition(".")[0]
    return PART_OF.get(first, first)


def at_once(tree: ast.Module) -> ast.Module:
    """The module without its functions: what is imported when it is."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    kept = [
        node for node in tree.body if not isinstance(node, functions | ast.ClassDef)
    ]
    return ast.Module(kept, [])


def inner_imports(name: str, trees: dict[str, ast.Module]) -> set[str]:
    """The modules of the package that module `name` imports."""
    found = set()
    for imported in imports(trees[name]):
        if imported.split(".")[0] != "sparkgap":
            continue
        inner = imported.removeprefix("sparkgap").lstrip(".")
        # `from sparkgap.a import b` is module a.b, else name b of module a.
        found.add(inner if inner in trees else inner.rpartition(".")[0])
    return found


def upward(trees: dict[str, ast.Module], allowed: dict[str, set[str]]) -> list[str]:
    """Imports that the table does not allow."""
    problems = []
    for name in trees:
        unit = unit_of(name)
        if unit not in allowed:
            problems.append(f"{name}: {unit} is not in the table of layers")
            continue
        granted = (
            {unit} | allowed[unit] | (LEAVES if unit not in LEAVES else {"errors"})
        )
        for inner in sorted(inner_imports(name, trees)):
            homes = {inner, unit_of(inner), *map(".".join, prefixes(inner))}
            if not homes & granted:
                problems.append(f"{name or 'sparkgap'} imports {inner or 'sparkgap'}")
    return problems


def prefixes(name: str) -> Iterator[list[str]]:
    parts = name.split(".")
    yield from (parts[:end] for end in range(1, len(parts)))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def foreign_to_reference(name: str, tree: ast.Module) -> list[str]:
    return [
        f"{name} imports {imported}"
        for imported in imports(tree)
        if imported.split(".")[0] not in REFERENCE_MAY_IMPORT
    ]


def triton_importers(trees: dict[str, ast.Module]) -> list[str]:
    return [
        name
        for name, tree in trees.items()
        if name != "_triton"
        and any(imported.split(".")[0] == "triton" for imported in imports(tree))
    ]


def relative(trees: dict[str, ast.Module]) -> list[str]:
    return [
        f"{name}: {imported}"
        for name, tree in trees.items()
        for imported in imports(tree)
        if imported.startswith(".")
    ]


def loaded_by(statement: str) -> set[str]:
    """Which of HEAVY a statement loads in a new process."""
    code = (
        f"{statement}\nimport json, sys\n"
        "print(json.dumps([m for m in sys.modules if '.' not in m]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout)) & set(HEAVY)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return modules(SOURCE)


def parsed(**sources: str) -> dict[str, ast.Module]:
    """A small package: module names with _ for the dots → source."""
    return {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


def test_arrows_go_down_only(trees):
    assert upward(trees, ALLOWED) == []


def test_no_module_waits_for_itself(trees):
    # The package itself names everything, for typing only.
    top = {name: at_once(tree) for name, tree in trees.items() if name}
    assert cycle({name: inner_imports(name, top) for name in top}) == []


def test_the_table_itself_goes_down_only():
    assert (
        cycle({u: {a.split(".")[0] for a in row} for u, row in ALLOWED.items()}) == []
    )


def test_every_row_of_the_table_is_a_unit(trees):
    assert set(ALLOWED) == {unit_of(name) for name in trees}


def test_definitions_import_torch_only(trees):
    named = {name: tree for name, tree in trees.items() if name.endswith(".reference")}
    assert named
    problems: Iterable[list[str]] = (
        foreign_to_reference(*item) for item in named.items()
    )
    assert [line for lines in problems for line in lines] == []


def test_one_module_imports_triton(trees):
    assert triton_importers(trees) == []


def test_imports_are_absolute(trees):
    assert relative(trees) == []


def test_the_checks_complain():
    bad = parsed(
        model="from sparkgap.drafter import Drafter",
        drafter="from sparkgap.model import step",
        train="def f():\n    from sparkgap.bench.generate import run",
        bench__generate="import triton.language as tl",
        bench="",
        config="import sparkgap.device",
        device="from . import config",
        ops__norm__reference="import numpy\nimport torch, math",
        novelty="",
    )
    assert upward(bad, ALLOWED) == [
        "model imports drafter",
        "train imports bench.generate",
        "config imports device",
        "novelty: novelty is not in the table of layers",
    ]
    assert set(cycle({name: inner_imports(name, bad) for name in bad})) == {
        "model",
        "drafter",
    }
    reference = "ops.norm.reference"
    assert foreign_to_reference(reference, bad[reference]) == [
        f"{reference} imports numpy"
    ]
    assert triton_importers(bad) == ["bench.generate"]
    assert relative(bad) == ["device: ..config"]
    assert upward(parsed(verify="from sparkgap import Drafter"), ALLOWED) == [
        "verify imports sparkgap"
    ]


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import sparkgap") == set()
    assert loaded_by("import sparkgap; sparkgap.InputError") == set()
    assert "torch" in loaded_by("import sparkgap; sparkgap.Drafter")


def test_the_command_line_answers_without_torch():
    assert "torch" not in loaded_by("import sparkgap.cli")


def test_no_module_loads_an_engine(trees):
    names = [f"sparkgap.{name}".rstrip(".") for name in trees]
    heavy = loaded_by("\n".join(f"import {name}" for name in names))
    assert heavy <= {"torch", "numpy"}


def test_importing_the_package_is_quick():
    code = "import sparkgap"

    def seconds(statement: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    # The best of three, since the machine has other work; the bare interpreter's off.
    extra = min(seconds(code) for _ in range(3)) - min(seconds("") for _ in range(3))
    assert extra < 0.5
