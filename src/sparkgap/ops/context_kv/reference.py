# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of context_kv."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkgap.ops.linear import linear
from sparkgap.ops.norm import norm
from sparkgap.primitives.rope import rotate


def latent_rows(
    projected: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, table: Tensor
) -> Tensor:
    """projected [..., kv_rank + rope] → cache rows: first part normed, tail rotated."""
    kv_rank = norm_weight.shape[-1]
    latent, tail = projected[..., :kv_rank], projected[..., kv_rank:]
    return torch.cat(
        [norm(latent, norm_weight, eps), rotate(tail, positions, table)], dim=-1
    )


def context_kv(
    features: Tensor,
    kv_a: Sequence[Tensor],
    kv_a_norm: Sequence[Tensor],
    eps: float,
    positions: Tensor,
    table: Tensor,
) -> Tensor:
    """features [C, d], kv_a L × [D, d], positions [C] → [L, C, D = kv_rank + rope].

    Context rows skip the layer's input norm: features are normed already, once for all.
    In bf16 the projection is rounded before it is normed, as engines do.
    """
    return torch.stack(
        [
            latent_rows(linear(features, weight), scale, eps, positions, table)
            for weight, scale in zip(kv_a, kv_a_norm, strict=True)
        ]
    )
