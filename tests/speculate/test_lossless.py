# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Verification gives the target's own distribution, and the test would notice if not.

100,000 rounds a case. Trials are independent, so p > 0.001 is what chance allows and a
wrong rule does not; the negative controls, known ways to be wrong, end below 1e-6.
"""

import pytest
import torch

from sparkgap.speculate.verify import draw, probabilities
from speculate.chi_square import (
    gumbel_argmax,
    text_p_value,
    token_p_value,
    uniforms,
    verified_texts,
)

TRIALS = 100_000
METHODS = ("block", "standard")
TEMPERATURES = (0.3, 1.0, 2.0)
# Three tokens, state = last token. One draft is good, but nowhere right; the poor one
# is refused often behind a weak token, where a wrong residual shows (block rejection
# without its weight: p = 1e-35 with the poor draft, 0.2 with the good one).
TARGET = torch.tensor([[1.0, 0.2, -0.9], [-0.4, 0.8, 0.3], [0.5, -1.1, 0.6]])
DRAFT = torch.tensor([[0.4, 0.6, -0.5], [0.3, 0.4, 0.1], [0.9, -0.2, -0.3]])
POOR = torch.tensor([[-0.4, 0.9, 0.5], [0.8, -0.6, 0.3], [-0.3, 0.7, -0.9]])
STEP = torch.arange(3).repeat(3, 1)


def shared_uniform(u):
    """A draft drawn by inverting its distribution at u [N, k]: noise for `choose`."""
    return u[..., None].expand(-1, -1, 3)


def by_inversion(logits, temperature, noise):
    return draw(probabilities(logits, temperature), noise[:, 0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("draft", [DRAFT, POOR], ids=["good", "poor"])
def test_whole_texts_are_distributed_as_the_targets(method, temperature, k, draft):
    texts, _ = verified_texts(TARGET, draft, STEP, temperature, method, TRIALS, k=k)
    assert text_p_value(texts, TARGET, STEP, temperature) > 0.001


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_block_keeps_no_fewer_than_standard(temperature):
    kept = {
        method: verified_texts(TARGET, DRAFT, STEP, temperature, method, TRIALS, k=4)[1]
        for method in METHODS
    }
    block, standard = (kept[method].double().mean() for method in METHODS)
    assert block > standard


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_with_a_token_the_target_never_gives(method):
    target = TARGET.clone()
    target[:, 2] = -torch.inf
    texts, _ = verified_texts(target, DRAFT, STEP, 1.0, method, TRIALS, k=3)
    assert not (texts == 2).any()
    assert text_p_value(texts, target, STEP, 1.0) > 0.001


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_never_gives_one_of_the_targets_tokens(method):
    draft = DRAFT.clone()
    draft[:, 1] = -torch.inf
    texts, _ = verified_texts(TARGET, draft, STEP, 1.0, method, TRIALS, k=3)
    assert text_p_value(texts, TARGET, STEP, 1.0) > 0.001


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_control_noise_shared_between_draft_and_verification(method, temperature):
    u = uniforms(5, TRIALS, 4)
    texts, _ = verified_texts(
        TARGET,
        DRAFT,
        STEP,
        temperature,
        method,
        TRIALS,
        k=3,
        choose=by_inversion,
        draft_noise=shared_uniform(u[:, :3]),
        noise=u,
    )
    assert text_p_value(texts, TARGET, STEP, temperature) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_control_argmax_draft_with_softmax_q(method, temperature):
    def argmax(logits, _temperature, _noise):
        return logits.argmax(-1)

    texts, _ = verified_texts(
        TARGET, DRAFT, STEP, temperature, method, TRIALS, k=3, choose=argmax
    )
    assert text_p_value(texts, TARGET, STEP, temperature) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_control_q_at_another_temperature_than_drawn_from(method, temperature):
    def hotter(logits, temperature, noise):
        return gumbel_argmax(logits, 1.5 * temperature, noise)

    texts, _ = verified_texts(
        TARGET, DRAFT, STEP, temperature, method, TRIALS, k=3, choose=hotter
    )
    assert text_p_value(texts, TARGET, STEP, temperature) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_control_q_rounded_to_bf16_after_the_draw(method):
    # Around 40 bf16 numbers are 0.25 apart, and rounding is worth up to 13 % of q.
    shifted = DRAFT + 40.07
    claimed = shifted.bfloat16().float()
    arguments = (TARGET, shifted, STEP, 1.0, method, TRIALS)
    right, _ = verified_texts(*arguments, k=3)
    wrong, _ = verified_texts(*arguments, k=3, claimed=claimed)
    assert text_p_value(right, TARGET, STEP, 1.0) > 0.001
    assert text_p_value(wrong, TARGET, STEP, 1.0) < 1e-6


def real_conditionals(target, prompt, top=50):
    """Logits [top+1, top] of a real target: after the prompt, and after each of its
    `top` likeliest next tokens, over those tokens alone."""
    ids = target.encode(prompt)
    sequence = target.open()
    root = sequence.forward(ids, 1)[0][0]
    tokens = root.topk(top).indices
    rows = [root[tokens]]
    for token in tokens.tolist():
        rows.append(sequence.forward([token], 1)[0][0, tokens])
        sequence.crop(len(ids))
    return torch.stack(rows)


def real_target_p_values(logits, temperature, method, trials=TRIALS, seed=0):
    """Chi-square p of the first and the second verified token against a real target.

    logits [V+1, V] as `real_conditionals` gives them. The draft is the target's own
    logits, flattened and disturbed: about as good as a trained one.
    """
    vocab = logits.shape[1]
    disturbed = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    step = (1 + torch.arange(vocab)).repeat(vocab + 1, 1)
    # Two drafts and two tokens' statistics: the state behind the second is never used.
    draft = 0.8 * logits + 0.7 * disturbed
    texts, accepted = verified_texts(
        logits, draft, step, temperature, method, trials, k=2, seed=seed
    )
    p_rows = probabilities(logits, temperature).double()
    second = p_rows[0] @ p_rows[1:]
    return (
        token_p_value(texts[:, 0], p_rows[0]),
        token_p_value(texts[:, 1], second),
        float(accepted.double().mean()),
    )


@pytest.fixture(scope="module")
def conditionals():
    pytest.importorskip("transformers")
    from sparkgap.speculate import Target

    return real_conditionals(Target.from_pretrained(), "Tell me a story about a ship.")


@pytest.mark.demo
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_real_next_tokens_are_distributed_as_the_targets(
    conditionals, method, temperature
):
    first, second, accepted = real_target_p_values(conditionals, temperature, method)
    assert first > 0.001
    assert second > 0.001
    assert accepted > 0.5
