# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A tree of weights as named tensors and back: "layers.0.q_a", "markov.w1", …"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from sparkgap.weights import DraftWeights


def named_tensors(weights: DraftWeights) -> dict[str, Tensor]:
    """Every tensor that is there, by its path through the dataclasses."""
    return dict(_walk(weights, ""))


def with_tensors(weights: DraftWeights, tensors: Mapping[str, Tensor]) -> DraftWeights:
    """The same tree with the named tensors in place of its own; others stay."""
    built: DraftWeights = _rebuild(weights, "", tensors)
    return built


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, tuple):
        return [(str(i), child) for i, child in enumerate(node)]
    return [(f.name, getattr(node, f.name)) for f in fields(node)]


def _walk(node: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield path, node
    elif isinstance(node, tuple) or is_dataclass(node):
        for name, child in _children(node):
            yield from _walk(child, f"{path}.{name}" if path else name)


def _rebuild(node: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        return tensors.get(path, node)
    if not (isinstance(node, tuple) or is_dataclass(node)):
        return node
    made = {
        name: _rebuild(child, f"{path}.{name}" if path else name, tensors)
        for name, child in _children(node)
    }
    if isinstance(node, tuple):
        return tuple(made.values())
    return replace(node, **made)  # type: ignore[type-var]
