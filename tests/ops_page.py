# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""docs/ops.md, made from the definitions' own signatures and docstrings.

`make docs` writes it; `test_docs.py` compares it with what it would be now.
"""

import ast
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "src" / "sparkgap" / "ops"
PAGE = ROOT / "docs" / "ops.md"

HEAD = """\
# Ops

Made by `make docs` from the docstrings; edit those. The letters are those of
[architecture.md](architecture.md).

What `src/sparkgap/model.py` is written over, in the order of a step. Each op is a
folder in `src/sparkgap/ops`; its `reference.py` is the definition: plain torch, fp32
inside, differentiable, any device, zero rows accepted.
"""

# In the order of a step; the op set is the list that counts, see `page`.
ORDER = (
    "linear",
    "norm",
    "context_kv",
    "embed",
    "mla_query",
    "mla_decode",
    "add_norm",
    "gated_mlp",
    "markov_sample",
    "confidence",
)


def op_names() -> set[str]:
    """The fields of OpSet."""
    tree = ast.parse((OPS / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "OpSet":
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return {ast.unparse(field.target) for field in fields}
    raise LookupError("no OpSet in sparkgap.ops")


def definition(op: str) -> tuple[Path, ast.FunctionDef]:
    for path in sorted(OPS.glob("*/reference.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == op:
                return path, node
    raise LookupError(f"no reference.py defines {op}")


def parameters(function: ast.FunctionDef) -> list[str]:
    """Each parameter as it is written: name: type = default."""
    given = function.args
    plain = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    both = list(zip(given.args, plain, strict=True))
    both += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    written = [
        ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
        for argument, default in both
    ]
    if given.kwonlyargs:
        written.insert(len(given.args), "*")
    return written


def section(op: str) -> str:
    path, function = definition(op)
    doc = inspect.cleandoc(ast.get_docstring(function) or "")
    written = parameters(function)
    returns = ast.unparse(function.returns) if function.returns else "None"
    call = f"{op}({', '.join(written)}) -> {returns}"
    if len(call) > 88:
        call = f"{op}(\n    " + ",\n    ".join(written) + f",\n) -> {returns}"
    where = path.relative_to(ROOT)
    return f"\n## {op}\n\n`{where}`\n\n```text\n{call}\n\n{doc}\n```\n"


def page() -> str:
    if set(ORDER) != op_names():
        raise LookupError(f"ORDER differs from OpSet by {set(ORDER) ^ op_names()}")
    return HEAD + "".join(section(op) for op in ORDER)


if __name__ == "__main__":
    PAGE.write_text(page())
