# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of RMSNorm: y = x / sqrt(mean(x²) + eps) * weight."""

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] (or [L, n] over x [C, L, n]) → like x, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., n] → norm(x + residual), x + residual.

    The sum is rounded to x's dtype before it is normed, as engines store it.
    """
    total = x + residual
    return norm(total, weight, eps), total
