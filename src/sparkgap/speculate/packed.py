# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Linear layers whose weights are packed once for the few rows of a decoding step.

torch's CPU GEMM repacks a weight at every call. For one row that costs nothing (a
matrix-vector product reads it as it lies), for the eight rows of a verification it is
a quarter of the pass. torch carries the libraries' packed forms for its compiler; here
they serve the model's own forward. The default target on two cores with AMX, ms:

    rows            1     8
    fp32 plain   30.1  55.3
    fp32 packed  30.1  42.2      MKL, packed for exactly that many rows
    bf16 plain   32.3  35.4
    bf16 packed  25.0  27.7      oneDNN, packed for any number of rows

The price is a second copy of the weights. Invariant: weights never change afterwards.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkgap.primitives import packed

# In fp32 one and two rows are faster as the weight lies: 15.6 and 16.3 ms, packed 17.6
# and 17.4, over all layers of the default target; four rows take 24.9, packed 19.6.
FEWEST_FP32_ROWS = 3
# A bf16 packing serves every row count, but at 64 rows and more (a prompt) the plain
# path, which also has its own layout to choose, is no slower.
MOST_ROWS = 32


class PackedLinear(nn.Linear):
    """An nn.Linear over the same parameters, with a packed copy for `rows` rows."""

    def __init__(self, plain: nn.Linear, rows: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.repack(rows)

    @torch.no_grad()
    def repack(self, rows: int) -> None:
        self.rows = rows
        pack = (
            torch.ops.mkl._mkl_reorder_linear_weight
            if self.weight.dtype == torch.float32
            else packed.pack
        )
        self._packed = pack(self.weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if self.weight.dtype == torch.float32:
            if rows != self.rows:
                return functional.linear(input, self.weight, self.bias)
            out: Tensor = torch.ops.mkl._mkl_linear(
                input, self._packed, self.weight, self.bias, rows
            )
            return out
        if rows > MOST_ROWS:
            return functional.linear(input, self.weight, self.bias)
        return packed.multiply(input, self._packed, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this torch, on this machine, packs a weight of this kind."""
    if weight.dtype == torch.float32:
        return weight.device.type == "cpu" and torch.backends.mkl.is_available()
    return packed.can_pack(weight)


def pack_linears(model: nn.Module, rows: int) -> None:
    """Pack the plain linear layers of a model for passes of `rows` rows, in place.

    Packs anew when called with another number of rows; leaves alone what gains nothing.
    """
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, PackedLinear) or not can_pack(module.weight):
            continue
        by_rows = module.weight.dtype == torch.float32
        if by_rows and rows < FEWEST_FP32_ROWS:
            continue
        if not isinstance(module, PackedLinear):
            model.set_submodule(name, PackedLinear(module, rows))
        elif by_rows and module.rows != rows:
            module.repack(rows)
