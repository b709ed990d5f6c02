# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""linear: y = x Wᵀ + b, products accumulated in fp32 and rounded once."""

from sparkgap.ops.linear.reference import linear

__all__ = ["linear"]
