# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""How far a correct result may be from the exact one: the one place that says so.

A result is a sum of `terms` products, accumulated in fp32 and rounded once to its
dtype. Three errors follow, all measured in ulp at the largest magnitude met:

* the rounding: half an ulp of the dtype;
* intermediate roundings: a row that is rounded to the dtype on its way enters the next
  sum with independent relative errors of at most eps/2, deviation eps/sqrt(12). They
  move that sum, whose own deviation is at most a third of the largest result, by five
  deviations of 5·eps/(3·sqrt(12)) = 0.48 eps: less than an ulp for each such rounding;
* the accumulation: every addition and product errs by at most half an fp32 ulp. They
  are independent, so their standard deviation is ulp·sqrt(2·terms/12), and five of
  those are 2·sqrt(terms) ulp.

Nothing here depends on a seed, a device or a run, and no caller multiplies a bound to
make a test pass. Read by the tests and by `sparkgap verify`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Per token of the whole step, against an fp64 evaluation of the same weights: what the
# stock engine itself reaches (5e-7 to 2e-6 in fp32, 0.7 to 2.7 % in bf16) with room for
# another order of the same sums in fp32 and none in bf16.
STEP_FP32 = 2e-5
STEP_BF16 = 2.7e-2


def ulp(dtype: torch.dtype, largest: float) -> float:
    """Distance between neighbouring numbers of `dtype` at magnitude `largest`."""
    info = torch.finfo(dtype)
    floor = info.smallest_normal
    if not math.isfinite(largest) or largest <= floor:
        return float(floor * info.eps)
    return float(2.0 ** math.floor(math.log2(largest)) * info.eps)


def bound(
    dtype: torch.dtype, largest: float, terms: int, inner_roundings: int = 0
) -> float:
    """Largest allowed distance from the exact result, for a result in `dtype`.

    `largest` is the largest magnitude that a partial sum or a result reaches, `terms`
    the number of products in one result, over all stages that feed each other, and
    `inner_roundings` the number of times that values are rounded to `dtype` before.
    """
    accumulation = 2.0 * math.sqrt(max(terms, 1)) * ulp(torch.float32, largest)
    return (0.5 + inner_roundings) * ulp(dtype, largest) + accumulation


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest distance over the largest magnitude of `expected`; 0 for no elements."""
    if expected.numel() == 0:
        return 0.0
    wanted = expected.double()
    distance = (actual.double() - wanted).abs().max()
    return float(distance / wanted.abs().max().clamp_min(torch.finfo().tiny))


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """Euclidean distance over the length of `expected`; 0 for no elements."""
    wanted = expected.double()
    length = torch.linalg.vector_norm(wanted).clamp_min(torch.finfo().tiny)
    return float(torch.linalg.vector_norm(actual.double() - wanted) / length)


@dataclass(frozen=True)
class Comparison:
    """Outcome of `compare`; `problem` is empty when the result is within the bound."""

    worst: float
    limit: float
    problem: str

    @property
    def ok(self) -> bool:
        return not self.problem


def compare(actual: Tensor, expected: Tensor, limit: float) -> Comparison:
    """Compare elementwise: same shape, NaN and ±inf in the same places, the rest within
    `limit`. The problem names the first worst element, both values and the bound."""
    if actual.shape != expected.shape:
        shapes = f"{list(actual.shape)}, expected {list(expected.shape)}"
        return Comparison(math.inf, limit, f"shape {shapes}")
    got, wanted = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = wanted.isfinite()
    same = got.eq(wanted) | (got.isnan() & wanted.isnan())
    distance = torch.where(finite, (got - wanted).abs(), torch.zeros_like(got))
    distance = torch.where(same, 0.0, distance.nan_to_num(nan=math.inf))
    distance = torch.where(finite | same, distance, math.inf)
    if distance.numel() == 0:
        return Comparison(0.0, limit, "")
    flat = int(distance.argmax())
    worst = float(distance.flatten()[flat])
    if worst <= limit:
        return Comparison(worst, limit, "")
    where = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
    values = f"{float(got.flatten()[flat])!r}, not {float(wanted.flatten()[flat])!r}"
    count = int((distance > limit).sum())
    problem = (
        f"{count} of {got.numel()} elements off; worst at {where}: {values}, "
        f"{worst:.3e} away where {limit:.3e} is allowed"
    )
    return Comparison(worst, limit, problem)
