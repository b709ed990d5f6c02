# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The three rules on cases small enough to know the answer, and their edges."""

import pytest
import torch

from sparkgap.speculate.verify import (
    RULES,
    block_rejection,
    draw,
    greedy_verify,
    probabilities,
    scatter_to_target,
    standard_rejection,
    verification_generator,
)

METHODS = ("block", "standard")


def random_rows(trials, rows, vocab, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return probabilities(
        size * torch.randn(trials, rows, vocab, generator=generator), 1.0
    )


def test_greedy_keeps_the_matching_prefix_and_adds_the_argmax():
    best = torch.tensor([[3, 1, 4, 1], [3, 1, 4, 1], [3, 1, 4, 1]])
    logits = torch.nn.functional.one_hot(best, 5).float()
    drafts = torch.tensor([[3, 1, 4], [3, 2, 4], [0, 1, 4]])
    verdict = greedy_verify(logits, drafts)
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.token.tolist() == [1, 1, 3]


def test_greedy_ties_go_to_the_lowest_id():
    verdict = greedy_verify(torch.zeros(1, 2, 7), torch.tensor([[0]]))
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([1], [0])


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_equal_to_the_target_is_always_kept(method):
    p = random_rows(1000, 5, 11, seed=1)
    drafts = torch.randint(0, 11, (1000, 4))
    noise = torch.full((1000, 5), 1 - 2**-53, dtype=torch.float64)
    verdict = RULES[method](p, p[:, :-1], drafts, noise)
    assert verdict.accepted.eq(4).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_the_target_excludes_is_never_kept_and_never_drawn(method):
    p = random_rows(1000, 3, 5, seed=2)
    p[:, :, 2] = 0
    q = random_rows(1000, 2, 5, seed=3)
    drafts = torch.full((1000, 2), 2)
    noise = torch.rand(1000, 3, dtype=torch.float64)
    noise[:, :2] = 0
    verdict = RULES[method](p, q, drafts, noise)
    assert verdict.accepted.eq(0).all()
    assert not verdict.token.eq(2).any()


@pytest.mark.parametrize("method", METHODS)
def test_a_refusal_without_residual_falls_back_to_the_target(method):
    # p and q differ in the drafted token alone and by one rounding: p - q has no
    # positive part at all.
    p = torch.tensor([[[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]])
    q = torch.tensor([[[0.5, 0.50001, 0.0]]])
    noise = torch.tensor([[1 - 1e-12, 0.75]], dtype=torch.float64)
    verdict = RULES[method](p, q, torch.tensor([[1]]), noise)
    assert (verdict.accepted.tolist(), verdict.token.tolist()) == ([0], [1])


@pytest.mark.parametrize("method", METHODS)
def test_no_drafts_at_all_is_plain_sampling(method):
    p = random_rows(4, 1, 6, seed=4)
    noise = torch.rand(4, 1, dtype=torch.float64)
    empty = torch.zeros(4, 0, dtype=torch.int64)
    verdict = RULES[method](p, torch.zeros(4, 0, 6), empty, noise)
    assert verdict.accepted.tolist() == [0] * 4
    assert torch.equal(verdict.token, draw(p[:, 0], noise[:, 0]))


def test_one_draft_is_the_same_case_for_both_rules():
    p, q = random_rows(5000, 2, 7, seed=5), random_rows(5000, 1, 7, seed=6)
    drafts = torch.randint(0, 7, (5000, 1))
    noise = torch.rand(5000, 2, dtype=torch.float64)
    block, standard = (
        rule(p, q, drafts, noise) for rule in (block_rejection, standard_rejection)
    )
    assert torch.equal(block.accepted, standard.accepted)
    assert torch.equal(block.token, standard.token)


def test_block_can_keep_what_follows_a_weak_token():
    # p/q is 1/2 and then 2: token for token the first falls half the time, as a block
    # both always stay (w_2 = 1).
    p = torch.tensor([[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]])
    q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    noise = torch.tensor([[0.9, 0.99, 0.1]], dtype=torch.float64)
    drafts = torch.tensor([[0, 0]])
    assert standard_rejection(p, q, drafts, noise).accepted.tolist() == [0]
    assert block_rejection(p, q, drafts, noise).accepted.tolist() == [2]


def test_the_draw_never_gives_a_token_of_weight_zero():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(4, 1)
    noise = torch.tensor([0.0, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, noise).tolist() == [1, 3, 3, 3]


def test_a_reduced_vocabulary_is_scattered_by_offsets():
    q = torch.tensor([[0.2, 0.3, 0.5]])
    out = scatter_to_target(q, torch.tensor([1, 1, 3]), 7)
    assert out.tolist() == [[0, q[0, 0], q[0, 1], 0, 0, q[0, 2], 0]]


def test_verification_noise_repeats_by_seed_and_differs_between_seeds():
    first, again, other = (
        torch.rand(8, generator=verification_generator(seed)) for seed in (1, 1, 2)
    )
    plain = torch.rand(8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, plain)
