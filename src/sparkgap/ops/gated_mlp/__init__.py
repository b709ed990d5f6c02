# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""gated_mlp: down(SiLU(gate(x)) * up(x)), gate and up in one matrix."""

from sparkgap.ops.gated_mlp.reference import gated_mlp

__all__ = ["gated_mlp"]
