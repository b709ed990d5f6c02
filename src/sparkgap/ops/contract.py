# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What an op is planned with: a use of it, who can run that, why the others cannot.

An `Implementation` states once, as data, when it is valid: `reasons_against` gives
every reason that speaks against a spec on a device, and an empty list means usable. The
planner, `sparkgap doctor` and the tests all call that one function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from sparkgap.device import Device


@dataclass(frozen=True)
class Reason:
    """Why an implementation cannot run: the value seen, then the value wanted."""

    text: str


@dataclass(frozen=True)
class OpSpec:
    """One use of an op in a step.

    op: its name; use: what the model uses it for (a linear is used for several things);
    rows: largest row count; sizes: dimensions by their letters (V, d, H, …); cache:
    None unless the op reads or writes it; causal, numerics: as the draft is run.
    """

    op: str
    use: str
    rows: int
    sizes: Mapping[str, int]
    activation: torch.dtype
    weight: torch.dtype
    cache: torch.dtype | None = None
    causal: bool = False
    numerics: Literal["stock", "fp32"] = "stock"


@dataclass(frozen=True)
class Implementation:
    """A way to run an op; `reasons_against(spec, device)` empty = usable."""

    name: str
    reasons_against: Callable[[OpSpec, Device], list[Reason]]


_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
_CACHES = (*_WEIGHTS, torch.float8_e4m3fn)


def _against_reference(spec: OpSpec, _device: Device) -> list[Reason]:
    """Plain torch runs on any device and size; only dtypes can be beyond it."""
    reasons = []
    if spec.weight not in _WEIGHTS:
        reasons.append(
            Reason(f"weights are {_name(spec.weight)}, wanted {_names(_WEIGHTS)}")
        )
    elif spec.weight != spec.activation:
        reasons.append(
            Reason(
                f"activations are {_name(spec.activation)}, weights "
                f"{_name(spec.weight)}: wanted the same of both"
            )
        )
    if spec.cache is not None and spec.cache not in _CACHES:
        reasons.append(
            Reason(f"the cache is {_name(spec.cache)}, wanted {_names(_CACHES)}")
        )
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *most, last = map(_name, dtypes)
    return f"{', '.join(most)} or {last}"


REFERENCE = Implementation("reference", _against_reference)
