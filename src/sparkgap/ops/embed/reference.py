# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of embed: a row look-up."""

import torch.nn.functional as F
from torch import Tensor


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """ids [...] int, table [V, d] → [..., d]. Ids must lie in [0, V)."""
    return F.embedding(ids, table)
