# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Which drafted tokens to keep, and the target's token that follows them.

All three rules take a batch: N trials of k drafts over V tokens.

    p      [N, k+1, V]  target probabilities; row i follows the first i drafts
    q      [N, k, V]    draft probabilities the drafts were drawn from
    drafts [N, k]       drafted tokens
    noise  [N, k+1]     uniforms in [0, 1), fp64: one per draft, the last for the token

and give accepted [N] (0 to k) and token [N], the target's own. Drafts kept plus that
token are distributed as the target's own text (greedy: are the target's own text).
It takes four things: q is what the drafts were drawn from, the noise is independent of
the draft's, p and q are at the same temperature, and the token after a rejection comes
from the residual.

Noise. The draft hashes (seed, position, step, token) as `primitives/gumbel.py` has it;
verification draws from a torch.Generator seeded by SHA-256 of a text naming its purpose
and the seed. Equal seeds therefore share nothing.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this decode greedily, as the published implementation does."""

Method = Literal["block", "standard"]


@dataclass(frozen=True)
class Verdict:
    """accepted [N] int64, 0 to k; token [N] int64, the one after the accepted ones."""

    accepted: Tensor
    token: Tensor


def verification_generator(seed: int) -> torch.Generator:
    """The randomness of one generation's verification, on the CPU."""
    digest = hashlib.sha256(f"sparkgap verification {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, in fp32.

    The logits are divided in fp32, as the draft does before it draws.
    """
    return torch.softmax(logits.float() / temperature, dim=-1)


def scatter_to_target(q: Tensor, d2t: Tensor, vocab_size: int) -> Tensor:
    """q [..., Vd] of a reduced draft vocabulary → [..., V], zero where nothing maps.

    d2t [Vd] holds offsets: draft token i is target token i + d2t[i].
    """
    tokens = torch.arange(d2t.numel(), device=d2t.device) + d2t
    out = q.new_zeros(*q.shape[:-1], vocab_size)
    out[..., tokens] = q
    return out


def greedy_verify(logits: Tensor, drafts: Tensor) -> Verdict:
    """Target logits [N, k+1, V]: keep drafts while they are the target's argmax."""
    best = logits.argmax(dim=-1)
    matches = (drafts == best[:, :-1]).long()
    accepted = matches.cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0])


def standard_rejection(p: Tensor, q: Tensor, drafts: Tensor, noise: Tensor) -> Verdict:
    """Keep draft i with probability min(1, p_i(x) / q_i(x)), to the first refusal."""
    p_draft, q_draft = _at(p[:, :-1], drafts), _at(q, drafts)
    # u·q < p instead of u < p/q: no division by a q of zero, and p = q always passes.
    keeps = (noise[:, :-1] * q_draft < p_draft).long()
    accepted = keeps.cumprod(dim=1).sum(dim=1)
    return Verdict(accepted, _next_token(p, q, accepted, None, noise[:, -1]))


def block_rejection(p: Tensor, q: Tensor, drafts: Tensor, noise: Tensor) -> Verdict:
    """Keep the longest prefix that a joint test of the whole block accepts.

    Block verification of Sun et al., arXiv 2403.10444, algorithm 2: with w_0 = 1 and
    w_i = min(1, w_{i-1} · p_i(x_i) / q_i(x_i)), prefix i < k passes with probability
    S / (S + 1 − w_i), S = Σ_x max(w_i·p_{i+1}(x) − q_{i+1}(x), 0), and the whole block
    with w_k. The token comes from max(w·p − q, 0). It never keeps fewer on average than
    standard rejection, and is as exact.
    """
    trials, count = drafts.shape
    p_draft, q_draft = _at(p[:, :-1], drafts), _at(q, drafts)
    weights = torch.ones(trials, count + 1, dtype=torch.float64, device=p.device)
    accepted = torch.zeros(trials, dtype=torch.int64, device=p.device)
    for i in range(1, count + 1):
        ratio = p_draft[:, i - 1] / q_draft[:, i - 1].clamp(min=1e-300)
        weights[:, i] = (weights[:, i - 1] * ratio).clamp(max=1.0)
        chance = weights[:, i]
        if i < count:
            surplus = _residual(p[:, i], q[:, i], chance).sum(dim=-1)
            whole = surplus + 1.0 - chance
            # 0/0: nothing was refused yet (w = 1) and p = q, so the prefix passes.
            chance = torch.where(whole > 0, surplus / whole, 1.0)
        accepted = torch.where(noise[:, i - 1] < chance, i, accepted)
    weight = weights.gather(1, accepted[:, None])[:, 0]
    return Verdict(accepted, _next_token(p, q, accepted, weight, noise[:, -1]))


RULES: dict[Method, Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]] = {
    "block": block_rejection,
    "standard": standard_rejection,
}


def draw(weights: Tensor, noise: Tensor) -> Tensor:
    """One token per row of weights [N, V] ≥ 0 (any positive sum), by noise [N] fp64.

    A token of weight zero is never drawn.
    """
    ends = weights.double().cumsum(dim=-1)
    total = ends[:, -1]
    # u·total may round up to total, which lies behind every token's share.
    below = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(noise * total, below)
    return torch.searchsorted(ends, point[:, None], right=True)[:, 0]


def _next_token(
    p: Tensor, q: Tensor, accepted: Tensor, weight: Tensor | None, noise: Tensor
) -> Tensor:
    """From p when every draft was kept, else from the residual max(w·p − q, 0)."""
    rows = torch.arange(accepted.numel(), device=p.device)
    target = p[rows, accepted].double()
    if not q.shape[1]:
        return draw(target, noise)
    draft = q[rows, accepted.clamp(max=q.shape[1] - 1)]
    residual = _residual(
        target, draft, target.new_ones(()) if weight is None else weight
    )
    # A residual of mass zero means p = q up to rounding: then p is what it tends to.
    whole = (accepted == q.shape[1]) | (residual.sum(dim=-1) <= 0)
    return draw(torch.where(whole[:, None], target, residual), noise)


def _residual(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    return (weight.reshape(-1, 1) * p.double() - q.double()).clamp(min=0)


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    return rows.gather(-1, tokens[..., None])[..., 0].double()
