# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Whether verified tokens have the target's distribution: trials and their chi-square.

A Markov target `target` [S, V] and draft [S, V] of logits: row s is the next token's
after state s, tokens lead to state `step[s, token]`. Shared by the tests and whoever
measures a real target.
"""

import torch

from sparkgap.speculate.verify import RULES, draw, probabilities


def p_value(counts, expected):
    """Upper tail of Pearson's chi-square; cells expected below 5 are put together."""
    counts, expected = counts.double(), expected.double()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def uniforms(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


def gumbel_argmax(logits, temperature, noise):
    """The draft's own way to draw: argmax of logits/T + Gumbel noise."""
    return (logits / temperature - (-noise.log()).log()).argmax(-1)


def verified_texts(
    target, draft, step, temperature, method, trials, *, k, seed=0, **how
):
    """Draft k tokens from state 0, verify, and continue by the target to k+1 tokens.

    Returns texts [trials, k+1] and accepted [trials]. how: `choose(logits, T, noise)`,
    the draft's draw; `draft_noise` [trials, k, V] and `noise` [trials, k+1] to use;
    `claimed` [S, V], logits that verification is told in place of draft's.
    """
    choose = how.get("choose", gumbel_argmax)
    draft_noise = how.get("draft_noise")
    if draft_noise is None:
        draft_noise = uniforms(2 * seed, trials, k, draft.shape[-1]).clamp(min=1e-300)
    noise = how.get("noise")
    if noise is None:
        noise = uniforms(2 * seed + 1, trials, k + 1)
    claimed = how.get("claimed", draft)
    states = [torch.zeros(trials, dtype=torch.int64)]
    drafts = []
    for i in range(k):
        drafts.append(choose(draft[states[-1]], temperature, draft_noise[:, i]))
        states.append(step[states[-1], drafts[-1]])
    visited, drafts = torch.stack(states, 1), torch.stack(drafts, 1)
    p_rows, q_rows = (
        probabilities(target, temperature),
        probabilities(claimed, temperature),
    )
    verdict = RULES[method](p_rows[visited], q_rows[visited[:, :-1]], drafts, noise)
    # Behind the verified tokens the target goes on alone: all of it must be its own.
    place = torch.arange(k + 1)[None]
    texts = torch.cat([drafts, drafts[:, :1]], 1)
    texts = torch.where(
        place == verdict.accepted[:, None], verdict.token[:, None], texts
    )
    extra = uniforms(7 * seed + 3, trials, k + 1)
    state = states[0]
    for i in range(k + 1):
        own = draw(p_rows[state], extra[:, i])
        texts[:, i] = torch.where(verdict.accepted < i, own, texts[:, i])
        state = step[state, texts[:, i]]
    return texts, verdict.accepted


def text_p_value(texts, target, step, temperature):
    """Chi-square of whole texts [N, n] against the target's own joint distribution."""
    vocab, length = target.shape[-1], texts.shape[1]
    p_rows = probabilities(target, temperature).double()
    chances, states = (
        torch.ones(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
    )
    for _ in range(length):
        chances = (chances[:, None] * p_rows[states]).flatten()
        states = step[states].flatten()
    code = torch.zeros(len(texts), dtype=torch.int64)
    for i in range(length):
        code = code * vocab + texts[:, i]
    counts = torch.bincount(code, minlength=vocab**length)
    return p_value(counts, chances * len(texts))


def token_p_value(tokens, weights):
    """Chi-square of tokens [N] against probabilities [V]."""
    counts = torch.bincount(tokens, minlength=len(weights))
    return p_value(counts, weights.double() * len(tokens))
