# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The chunked loss against its definition, by autograd in fp64."""

import pytest
import torch

from sparkgap.train import objective
from sparkgap.train.objective import Frozen, Weights, distill, row_losses


@pytest.mark.parametrize("chunk", [1, 5, 13, 4096])
@pytest.mark.parametrize("weights", [Weights(0.1, 0.9), Weights(1.0, 0.0)], ids=str)
def test_loss_and_gradients_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, chunk: int, weights: Weights
) -> None:
    monkeypatch.setattr(objective, "CHUNK", chunk)
    draw = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    rows, width, rank, vocab = 13, 6, 3, 11
    learned = [
        values(rows, width).requires_grad_(),
        values(rows, rank).requires_grad_(),
        values(vocab, rank).requires_grad_(),
    ]
    hidden, extra, head = learned
    frozen = Frozen(values(vocab, width), values(rows, width))
    weight = torch.rand(rows, dtype=torch.float64, generator=draw)
    weight[3] = 0.0

    loss, ce, tv = distill(hidden, extra, head, frozen, weight, weights)
    (3.0 * loss).backward()
    found = [tensor.grad.clone() for tensor in learned]
    for tensor in learned:
        tensor.grad = None
    want_ce, want_tv = row_losses(
        hidden @ frozen.lm_head.T + extra @ head.T,
        frozen.target_hidden @ frozen.lm_head.T,
    )
    want = ((weights.ce * want_ce + weights.tv * want_tv) * weight).sum()
    (3.0 * want).backward()

    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(ce, want_ce)
    torch.testing.assert_close(tv, want_tv)
    for got, tensor in zip(found, learned, strict=True):
        torch.testing.assert_close(got, tensor.grad)


def test_equal_distributions_cost_the_entropy_alone() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    ce, tv = row_losses(logits, logits + 2.0)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(ce, entropy)
    torch.testing.assert_close(tv, torch.zeros(4), atol=1e-6, rtol=0)


def test_disjoint_distributions_are_at_distance_one() -> None:
    apart = torch.tensor([[40.0, 0.0], [0.0, 40.0]])
    _, tv = row_losses(apart, apart.flip(-1))
    torch.testing.assert_close(tv, torch.ones(2))
