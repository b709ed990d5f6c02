# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of gated_mlp."""

import torch.nn.functional as F
from torch import Tensor

from sparkgap.ops.linear import linear


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, d], gate_up [2F, d] (gate's rows first), down [d, F] → [T, d].

    The product SiLU(gate) * up is formed in fp32 and rounded once, as engines do.
    """
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    inner = (F.silu(gate.float()) * up.float()).to(x.dtype)
    return linear(inner, down)
