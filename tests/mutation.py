# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Eight faults that a draft could have, each put into the package's own functions, and
the checks that catch it. `test_mutation.py` shows that every check passes without the
fault and fails with it.

Which cases can fail matters: eps moves the step only when its input is small, tap order
and mask faults are invisible with one tap or one row, and a position that is off by one
in context and block alike is invisible to rotary attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.test_context_kv import check_context_kv
from ops.test_mla_decode import check_causal_flag, check_lost_row
from ops.test_mla_query import check_mla_query
from ops.test_norm import check_eps
from primitives.test_rope import check_interleaved
from sparkgap import ops
from sparkgap.config import DraftConfig
from sparkgap.model import DraftModel
from test_model import GEOMETRIES, check_step, check_ties

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """inject: puts it in; checks: named checks that must fail with it."""

    inject: Patch
    checks: dict[str, Callable[[], None]]


def set_op(patch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Replace an op in the model's set and where tests call it by name."""
    faulty = change(getattr(ops.REFERENCE, name))
    patch.setattr(ops, "REFERENCE", replace(ops.REFERENCE, **{name: faulty}))
    patch.setattr(ops, name, faulty)


def wrong_eps(patch: pytest.MonkeyPatch) -> None:
    """eps hard-coded, whatever the config says."""
    set_op(patch, "norm", lambda op: lambda x, weight, _eps: op(x, weight, 1e-6))


def lost_context_row(patch: pytest.MonkeyPatch) -> None:
    """The row just before the anchor is not attended."""

    def change(op: Any) -> Any:
        def faulty(q: Any, rows: Any, extent: Any, *rest: Any) -> Any:
            fewer = (extent.context_lens - 1).clamp(min=0)
            return op(q, rows, replace(extent, context_lens=fewer), *rest)

        return faulty

    set_op(patch, "mla_decode", change)


def tap_order(patch: pytest.MonkeyPatch) -> None:
    """The tapped layers are concatenated last first."""
    combine = DraftModel.combine
    patch.setattr(DraftModel, "combine", lambda m, taps: combine(m, taps.flip(1)))


def wrong_causal_flag(patch: pytest.MonkeyPatch) -> None:
    """A causal draft is run whole and a whole one causally."""

    def change(op: Any) -> Any:
        def faulty(q: Any, rows: Any, extent: Any, *rest: Any) -> Any:
            return op(q, rows, replace(extent, causal=not extent.causal), *rest)

        return faulty

    set_op(patch, "mla_decode", change)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The block stands one position too far from its context."""

    def change(op: Any) -> Any:
        def faulty(
            hidden: Any, weights: Any, eps: Any, positions: Any, table: Any
        ) -> Any:
            return op(hidden, weights, eps, positions + 1, table)

        return faulty

    set_op(patch, "mla_query", change)


def neox_rope(patch: pytest.MonkeyPatch) -> None:
    """Pairs (i, i + dim/2) are turned instead of (2i, 2i + 1)."""

    def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[positions].chunk(2, dim=-1)
        low, high = x.float().chunk(2, dim=-1)
        turned = [low * cos - high * sin, high * cos + low * sin]
        return torch.cat(turned, dim=-1).to(x.dtype)

    for module in (
        "primitives.rope",
        "ops.context_kv.reference",
        "ops.mla_query.reference",
    ):
        patch.setattr(import_module(f"sparkgap.{module}"), "rotate", rotate)


def scale_without_mscale(patch: pytest.MonkeyPatch) -> None:
    """YaRN's magnitude correction is left out of the softmax scale."""
    plain = property(lambda config: config.qk_head_dim**-0.5)
    patch.setattr(DraftConfig, "softmax_scale", plain)


def tie_to_the_higher_id(patch: pytest.MonkeyPatch) -> None:
    """Of equal scores the last one wins, as with a >= in place of a >."""

    def highest(token_ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen, token_ids, -1).amax(dim=-1)

    module = import_module("sparkgap.ops.markov_sample.reference")
    patch.setattr(module, "_lowest", highest)


def step_of(key: str) -> dict[str, Callable[[], None]]:
    return {f"test_model[{key}]": partial(check_step, GEOMETRIES[key])}


FAULTS = {
    "eps": Fault(
        wrong_eps,
        {"test_norm.check_eps": check_eps, **step_of("small taps")},
    ),
    "lost context row": Fault(
        lost_context_row,
        {"test_mla_decode.check_lost_row": check_lost_row, **step_of("ragged")},
    ),
    "tap order": Fault(tap_order, {**step_of("k3"), **step_of("fc_norm")}),
    "causal flag": Fault(
        wrong_causal_flag,
        {
            "test_mla_decode.check_causal_flag": check_causal_flag,
            **step_of("k3"),
            **step_of("causal"),
        },
    ),
    "position off by one": Fault(
        position_off_by_one,
        {
            "test_mla_query.check_mla_query": partial(check_mla_query, 3, 2),
            **step_of("plain"),
            **step_of("k3"),
        },
    ),
    "rope neox": Fault(
        neox_rope,
        {
            "test_rope.check_interleaved": check_interleaved,
            "test_context_kv.check_context_kv": partial(check_context_kv, 3, 1),
            "test_mla_query.check_mla_query": partial(check_mla_query, 3, 2),
            **step_of("k3"),
        },
    ),
    "scale without mscale": Fault(
        scale_without_mscale, {**step_of("k3"), **step_of("odd yarn")}
    ),
    "tie to the higher id": Fault(
        tie_to_the_higher_id, {"test_model.check_ties": check_ties}
    ),
}
