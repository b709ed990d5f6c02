# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of mla_query.

Absorbed form: a key of head h is W_UK[h] · latent, so q · key = (q W_UK[h]) · latent,
and the query can meet the cached latent row itself. In bf16 each projection is rounded
before the next, as engines do.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.ops.context_kv.reference import latent_rows
from sparkgap.ops.linear import linear
from sparkgap.ops.norm import norm
from sparkgap.primitives.rope import rotate


@dataclass(frozen=True)
class QueryWeights:
    """q_a [q_rank, d], q_a_norm [q_rank], q_b [H * (nope + rope), q_rank],
    kv_a [kv_rank + rope, d], kv_a_norm [kv_rank], w_uk [H, nope, kv_rank]."""

    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    w_uk: Tensor


def mla_query(
    hidden: Tensor, weights: QueryWeights, eps: float, positions: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """hidden [T, d], positions [T] → q [T, H, D], kv [T, D], D = kv_rank + rope."""
    heads, nope, _ = weights.w_uk.shape
    q = norm(linear(hidden, weights.q_a), weights.q_a_norm, eps)
    q = linear(q, weights.q_b).unflatten(-1, (heads, -1))
    absorbed = torch.einsum("thn,hnc->thc", q[..., :nope], weights.w_uk)
    tail = rotate(q[..., nope:], positions.unsqueeze(-1), table)
    kv = latent_rows(
        linear(hidden, weights.kv_a), weights.kv_a_norm, eps, positions, table
    )
    return torch.cat([absorbed, tail], dim=-1), kv
