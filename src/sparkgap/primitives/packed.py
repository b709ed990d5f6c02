# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Weights in oneDNN's own layout, for the few rows of a decoding step on a CPU.

torch's bf16 CPU GEMM reorders a weight [N, K] at every call, which the few rows of a
draft block do not pay back. A packed weight is an ordinary tensor of layout
`torch._mkldnn`: it knows its shape, it cannot be indexed, and it must not change. Of a
[49152, 576] lm_head under 7 rows on two cores with AMX: plain 2.0 ms, packed 1.2 ms,
the same bits.
"""

import torch
from torch import Tensor


def can_pack(weight: Tensor) -> bool:
    """Whether this torch, on this machine, packs a weight of this kind."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@torch.no_grad()
def pack(weight: Tensor, rows: int) -> Tensor:
    """A copy of weight [N, K] in the layout that suits products of about `rows` rows;
    it serves any number of them."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] Wᵀ + bias for a packed W; the result has x's dtype."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
