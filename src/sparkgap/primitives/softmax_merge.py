# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Merging attention over disjoint sets of rows.

Each part gives its softmax average [..., n] and the natural logarithm of its softmax
denominator, `lse` [...]. A part that saw no row has lse = -inf and whatever output.
"""

import torch
from torch import Tensor


def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge S parts, outs [S, ..., n] and lses [S, ...] → out [..., n], lse [...] fp32.

    Summed in the order given, in fp32. Nothing seen by any part → out 0, lse -inf.
    """
    lses = lses.float()
    total = torch.logsumexp(lses, dim=0)
    # exp(-inf - -inf) would be NaN; a part without rows must not touch the others.
    seen = lses > -torch.inf
    shares = torch.where(seen, (lses - total).exp(), 0.0).unsqueeze(-1)
    parts = torch.where(seen.unsqueeze(-1), outs.float(), 0.0)
    return (parts * shares).sum(0), total
