# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""confidence: how likely the target is to accept each drafted token."""

from sparkgap.ops.confidence.reference import confidence, confidence_logit

__all__ = ["confidence", "confidence_logit"]
