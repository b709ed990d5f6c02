# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of markov_sample: the sequential stage, its three heads and its choice.

Step i of k adds to base logits [R, Vd] the bias that the token before it gives, and
chooses a token: at temperature 0 the argmax, else the argmax of logits / temperature +
noise (`primitives/gumbel.py`), which is a draw from softmax(logits / temperature).

One rule chooses, whole or by vocabulary shard: the highest score wins, and among equal
scores the lowest token id. NaN scores as -inf; so a row of NaN and -inf gives the
lowest id, and of several +inf the lowest wins. Rows never meet: a bad one harms no
other.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgap.errors import InputError
from sparkgap.ops.linear import linear
from sparkgap.primitives.gumbel import draft_stream, gumbel
from sparkgap.weights import MarkovWeights

Numerics = Literal["stock", "fp32"]
"""stock: bias and sum are rounded to the base logits' dtype, as vLLM rounds them, and
the rounded sum is chosen from. fp32: both stay in fp32."""


@dataclass(frozen=True)
class Sampling:
    """How each request draws; all of it is a request's own, whatever its row.

    temperatures [R] fp32 ≥ 0, 0 is greedy; seeds [R] int64; positions [R, k] int64: the
    position that each drafted token will occupy (the row's own for fill-in layouts, one
    more for anchor-first), not clamped to the model length.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor


@dataclass(frozen=True)
class MarkovDraft:
    """tokens [R, k] int64, target ids; logits [R, k, Vd] or None, by draft id, before
    temperature: exactly what the tokens were chosen from."""

    tokens: Tensor
    logits: Tensor | None


def markov_sample(
    base: Tensor,
    anchors: Tensor,
    weights: MarkovWeights | None,
    sampling: Sampling,
    *,
    hidden: Tensor | None = None,
    numerics: Numerics = "stock",
    d2t: Tensor | None = None,
    return_logits: bool = True,
) -> MarkovDraft:
    """base [R, k, Vd], anchors [R] → k tokens a request, left to right.

    hidden [R, k, d] is for gated and rnn heads. weights None adds no bias. d2t [Vd]:
    draft id i is token i + d2t[i]; noise, ties and W1 go by token, logits by draft id.
    Logits come back in base's dtype (stock) or fp32, NaN as -inf. A row whose maximum
    is infinite has no softmax: its token was certain.
    """
    dtype = torch.float32 if numerics == "fp32" else base.dtype
    if weights is not None:
        # Once a call, not once a step: W2 is the one large operand.
        wide = torch.promote_types(weights.w2.dtype, dtype)
        weights = replace(weights, w2=weights.w2.to(wide))
    token_ids = torch.arange(base.shape[-1], device=base.device)
    token_ids = token_ids if d2t is None else token_ids + d2t
    previous, state = anchors.long(), None
    tokens, cached = [], []
    for step in range(base.shape[1]):
        logits = base[:, step].to(dtype)
        if weights is not None:
            row = None if hidden is None else hidden[:, step]
            bias, state = markov_bias(weights, previous, row, state)
            logits = logits + bias.to(dtype)
        _, previous = best_in_shard(logits, token_ids, sampling, step)
        tokens.append(previous)
        if return_logits:
            cached.append(torch.where(logits.isnan(), -torch.inf, logits))
    return MarkovDraft(
        torch.stack(tokens, dim=1), torch.stack(cached, dim=1) if cached else None
    )


def markov_bias(
    weights: MarkovWeights,
    previous: Tensor,
    hidden: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Bias [N, Vd] that tokens previous [N] give to their successors' logits.

    hidden [N, d] is that of the successors' rows. state [N, r] fp32, None at the first
    step, is the rnn's memory: give back the one returned. What W2 multiplies is
    computed in fp32 and rounded once to W2's dtype; the bias has that dtype too.
    Differentiable; under teacher forcing a vanilla or gated head takes all steps'
    rows at once.
    """
    embedded = F.embedding(previous, weights.w1).float()
    if weights.gate_w is not None:
        features = torch.cat([_required(hidden, "gated").float(), embedded], dim=-1)
        gate = torch.sigmoid(_wide(features, weights.gate_w, weights.gate_b))
        embedded = gate * embedded
    elif weights.joint_w is not None:
        state = torch.zeros_like(embedded) if state is None else state
        row = _required(hidden, "rnn").float()
        features = torch.cat([state, embedded, row], dim=-1)
        joint = _wide(features, weights.joint_w, weights.joint_b)
        before, candidate, out = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(before)
        state = keep * state + (1.0 - keep) * torch.tanh(candidate)
        embedded = torch.tanh(out)
    return linear(embedded.to(weights.w2.dtype), weights.w2), state


def best_in_shard(
    logits: Tensor, token_ids: Tensor, sampling: Sampling, step: int
) -> tuple[Tensor, Tensor]:
    """The best score [R] fp32 and its token id [R] int64 in a slice of the vocabulary.

    logits [R, n] are the slice's, token_ids [n] the ids of its columns in the whole
    vocabulary. An empty slice scores -inf under an id above all others.
    """
    if not token_ids.numel():
        nothing = logits.new_full(logits.shape[:1], -torch.inf, dtype=torch.float32)
        return nothing, torch.full_like(nothing, _NO_TOKEN, dtype=torch.int64)
    scores = _scores(logits.float(), token_ids, sampling, step)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best = scores.amax(dim=-1)
    return best, _lowest(token_ids, scores == best[:, None])


def merge_shards(scores: Tensor, tokens: Tensor) -> Tensor:
    """`best_in_shard` of all shards, scores [P, R] and tokens [P, R] → token ids [R].

    The order of the shards and the cuts between them do not matter.
    """
    return _lowest(tokens.T, (scores == scores.amax(dim=0)).T)


_NO_TOKEN = torch.iinfo(torch.int64).max


def _lowest(token_ids: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, token_ids, _NO_TOKEN).amin(dim=-1)


def _scores(logits: Tensor, token_ids: Tensor, sampling: Sampling, step: int) -> Tensor:
    temperatures = sampling.temperatures[:, None]
    if not bool(temperatures.any()):
        return logits  # the noise of a row takes longer than its logits
    seeds, positions = draft_stream(sampling.seeds, sampling.positions[:, step], step)
    added = gumbel(seeds[:, None], positions[:, None], token_ids)
    return torch.where(temperatures == 0, logits, logits / temperatures + added)


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight.float(), None if bias is None else bias.float())


def _required(hidden: Tensor | None, head: str) -> Tensor:
    if hidden is None:
        raise InputError(
            f"the {head} Markov head reads hidden states and got None; give "
            "hidden [R, k, d], the rows the base logits were computed from"
        )
    return hidden
