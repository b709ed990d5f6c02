# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of confidence: c = sigmoid(w · [h ; W1[previous token]] + b)."""

import torch
from torch import Tensor


def confidence_logit(
    hidden: Tensor, previous: Tensor | None, weight: Tensor, bias: Tensor
) -> Tensor:
    """hidden [..., d], previous [..., r] | None, weight [1, d (+ r)] → [...] fp32."""
    features = hidden if previous is None else torch.cat([hidden, previous], dim=-1)
    return (features.float() * weight[0].float()).sum(-1) + bias.float()


def confidence(
    hidden: Tensor, previous: Tensor | None, weight: Tensor, bias: Tensor
) -> Tensor:
    """As `confidence_logit`, through the sigmoid: probabilities [...] fp32.

    Trained towards 1 - total variation between draft and target, which is the chance
    that rejection sampling accepts the token (arXiv 2607.05147).
    """
    return torch.sigmoid(confidence_logit(hidden, previous, weight, bias))
