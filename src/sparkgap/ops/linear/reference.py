# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of linear."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgap.primitives import packed

# MKL's fp32 GEMM of 7 rows over a vocabulary of 49152 takes 19 ms on two cores, of 8
# rows 10 ms.
_CPU_FP32_ROWS = 8


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [..., K], weight [N, K], bias [N] → [..., N] in out_dtype (default x's).

    Accumulates in fp32: so do torch's matmuls for fp32 and bf16 operands. An out_dtype
    wider than x's skips the rounding to x's dtype. A packed weight is one of x's dtype.
    """
    if out_dtype is not None and out_dtype != x.dtype:
        wide = torch.promote_types(x.dtype, out_dtype)
        x, weight = x.to(wide), weight.to(wide)
        bias = None if bias is None else bias.to(wide)
        return linear(x, weight, bias).to(out_dtype)
    if weight.is_mkldnn:
        return packed.multiply(x, weight, bias)
    rows = x.shape[0]
    pad = x.device.type == "cpu" and x.dim() == 2 and 1 < rows < _CPU_FP32_ROWS
    if pad and x.dtype == torch.float32:
        return F.linear(F.pad(x, (0, 0, 0, _CPU_FP32_ROWS - rows)), weight, bias)[:rows]
    return F.linear(x, weight, bias)
