# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Rotary position embedding as the K3 drafts use it.

The table is [max_positions, dim] fp32: cosines in the first half, sines in the second,
both times the table scale of YaRN. `model.py` builds it once, `context_kv` and
`mla_query` read it. It stays fp32 whatever the weights are: an fp32 angle is already
off by 8.8e-3 at position 131072, a bf16 one would be noise.

Source of the frequencies: YaRN (arXiv 2309.00071) in the form DeepSeek uses, where the
ramp runs over whole dimensions and the magnitude correction goes into both the table
and the softmax scale (`DraftConfig.softmax_scale`).
"""

import math

import torch
from torch import Tensor

from sparkgap.config import RopeConfig, Yarn


def rope_table(rope: RopeConfig, max_positions: int) -> Tensor:
    """Cosines and sines [max_positions, dim] fp32 of every position and frequency."""
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope)
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.table_scale


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angle per position [dim/2] fp32 of each rotated pair."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    turns = rope.theta**exponents
    plain = 1.0 / turns
    if rope.yarn is None:
        return plain
    # In this order the table is bitwise vLLM's for any factor.
    stretched = 1.0 / (rope.yarn.factor * turns)
    keep = _kept_share(rope, rope.yarn)
    return stretched * (1.0 - keep) + plain * keep


def _kept_share(rope: RopeConfig, yarn: Yarn) -> Tensor:
    """Share [dim/2] of each plain frequency that YaRN keeps: 1 fast, 0 slow pairs."""

    def pair_that_turns(times: float) -> float:
        span = yarn.original_max_position / (times * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), rope.dim - 1)
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    # A ramp of no width would divide by zero; 0.001 makes it a step. A negative width
    # (the cuts crossed) stretches every pair, as in vLLM.
    ramp = (pairs - low) / ((high - low) or 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate the last dimension of x [..., dim], pairs (0, 1), (2, 3), … together.

    `positions` broadcasts to x.shape[:-1]; the result has x's dtype, fp32 inside.
    """
    cos, sin = table[positions].chunk(2, dim=-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
