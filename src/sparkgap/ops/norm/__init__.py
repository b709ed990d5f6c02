# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""norm: RMSNorm, plain or with the residual added first, fp32 inside."""

from sparkgap.ops.norm.reference import add_norm, norm

__all__ = ["add_norm", "norm"]
