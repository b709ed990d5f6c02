# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The draft step in float64, from its formulas alone: what every other form must equal.

Written to share nothing with the package: numpy, loops over requests, rows and heads,
and attention that builds each head's keys and values from the latents (`K = W_UK c`,
`V = W_UV c`) where the package moves those matrices to the query and the output. Takes
torch tensors or arrays, whose values it reads exactly, and returns float64 arrays.
Nothing here is rounded, so a difference is the package's error or a fault."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparkgap.verify.tolerance import compare

Array = np.ndarray


def exact(values: Any) -> Array:
    """The values as float64 (every dtype that the package uses fits)."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().to(torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def assert_close(actual: torch.Tensor, expected: Array, limit: float) -> None:
    outcome = compare(actual, torch.from_numpy(np.asarray(expected)), limit)
    assert outcome.ok, outcome.problem


# Rotary embedding -----------------------------------------------------------------


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def frequencies(dim: int, theta: float, yarn: Any) -> list[float]:
    """Radians a position, for each of the dim/2 pairs."""
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return plain

    def pair_that_turns(rotations: float) -> float:
        wavelength = yarn.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    result = []
    for i, frequency in enumerate(plain):
        interpolated = min(max((i - low) / width, 0.0), 1.0)
        stretched = frequency / yarn.factor
        result.append(stretched * interpolated + frequency * (1.0 - interpolated))
    return result


def table_magnitude(yarn: Any) -> float:
    if yarn is None:
        return 1.0
    over = yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
    return yarn_magnitude(yarn.factor, yarn.mscale) / over


def rotate(vector: Array, position: int, rope: Any) -> Array:
    """Turn the pairs (2i, 2i+1) of one vector [dim] by their angle at `position`."""
    out = np.zeros_like(vector)
    size = table_magnitude(rope.yarn)
    for i, frequency in enumerate(frequencies(rope.dim, rope.theta, rope.yarn)):
        c = math.cos(position * frequency) * size
        s = math.sin(position * frequency) * size
        a, b = vector[2 * i], vector[2 * i + 1]
        out[2 * i], out[2 * i + 1] = a * c - b * s, a * s + b * c
    return out


def softmax_scale(config: Any) -> float:
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    scale = 1.0 / math.sqrt(width)
    yarn = config.rope.yarn
    if yarn is not None and yarn.attention_factor != 1:
        # Not given counts as 0 here too, so the factor is 1 (vLLM 0.33.0,
        # models/kimi_k3/nvidia/mla.py:182).
        scale *= yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


# Dense parts ----------------------------------------------------------------------


def rms_norm(row: Array, weight: Array, eps: float) -> Array:
    """One row [n]."""
    mean_square = math.fsum(float(v) * float(v) for v in row) / len(row)
    return row / math.sqrt(mean_square + eps) * weight


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(np.asarray(x) >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def gated_mlp(row: Array, gate_up: Array, down: Array) -> Array:
    """One row [d]; the first half of gate_up's rows is the gate."""
    inner = gate_up.shape[0] // 2
    gate, up = gate_up[:inner] @ row, gate_up[inner:] @ row
    return down @ (gate * sigmoid(gate) * up)


def context_feature(
    taps: Array, proj: Array, weight: Array, eps: float, fc_norms: Sequence[Array]
) -> Array:
    """taps [m, d_t] of one row -> [d]; every tap has its own norm or none has."""
    parts = [taps[i] for i in range(taps.shape[0])]
    if fc_norms:
        parts = [rms_norm(p, n, eps) for p, n in zip(parts, fc_norms, strict=True)]
    return rms_norm(proj @ np.concatenate(parts), weight, eps)


def latent(
    row: Array, kv_a: Array, norm: Array, eps: float, position: int, rope: Any
) -> tuple[Array, Array]:
    """One row [d] -> (normed latent [kv_rank], rotated shared key [rope])."""
    both = kv_a @ row
    rank = norm.shape[0]
    return rms_norm(both[:rank], norm, eps), rotate(both[rank:], position, rope)


def softmax_mix(scores: Array, values: Array) -> tuple[Array, float]:
    """scores [n], values [n, v] -> (mixture [v], log of the sum of exponentials)."""
    if len(scores) == 0:
        return np.zeros(values.shape[1]), -math.inf
    top = float(scores.max())
    weights = np.exp(scores - top)
    total = math.fsum(weights)
    return weights @ values / total, top + math.log(total)


# The step -------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One request of a step: its context rows and the token it drafts from."""

    taps: Array  # [C, m, d_t]
    positions: Sequence[int]  # [C]
    anchor: int
    start: int  # position of the anchor


@dataclass(frozen=True)
class Step:
    hidden: Array  # [R, q, d], after the last norm
    base: Array  # [R, k, V]
    logits: Array  # [R, k, V]
    confidence: Array | None  # [R, k]
    tokens: Array  # [R, k], the argmax of every logits row as a target id


class Oracle:
    """`config` and `weights` in float64. k is the number of tokens to draft."""

    def __init__(self, config: Any, weights: Any, num_drafts: int | None = None):
        self.config, self.weights = config, weights
        offset = 0 if config.sample_from_anchor else 1
        self.k = num_drafts or config.block_size - offset
        self.offset, self.rows = offset, self.k + offset
        self.embedding = exact(weights.embedding)
        self.lm_head = exact(weights.lm_head)

    def features(self, taps: Array) -> Array:
        """[C, m, d_t] -> [C, d]."""
        w, eps = self.weights, self.config.rms_norm_eps
        proj, norm = exact(w.context_proj), exact(w.context_norm)
        fc = [exact(n) for n in w.fc_norms]
        rows = [context_feature(row, proj, norm, eps, fc) for row in exact(taps)]
        return np.array(rows).reshape(len(rows), self.config.hidden_size)

    def attention(
        self,
        layer: Any,
        states: Array,
        places: Sequence[int],
        context: list[tuple[Array, Array]],
    ) -> Array:
        """Normed states [q, d] at `places` over `context` and themselves -> [q, d]."""
        c = self.config
        eps, nope, wide = c.rms_norm_eps, c.qk_nope_head_dim, c.v_head_dim
        q_a, q_a_norm, q_b = exact(layer.q_a), exact(layer.q_a_norm), exact(layer.q_b)
        kv_a, kv_a_norm = exact(layer.kv_a), exact(layer.kv_a_norm)
        kv_b, o = exact(layer.kv_b), exact(layer.o)
        own = [
            latent(row, kv_a, kv_a_norm, eps, place, c.rope)
            for row, place in zip(states, places, strict=True)
        ]
        result = np.zeros((len(states), c.num_heads * wide))
        for t, (row, place) in enumerate(zip(states, places, strict=True)):
            query = q_b @ rms_norm(q_a @ row, q_a_norm, eps)
            seen = context + (own[: t + 1] if c.causal else own)
            for h in range(c.num_heads):
                mine = query[h * (nope + c.qk_rope_head_dim) :][
                    : nope + c.qk_rope_head_dim
                ]
                turned = rotate(mine[nope:], place, c.rope)
                up = kv_b[h * (nope + wide) : (h + 1) * (nope + wide)]
                scores = [
                    (mine[:nope] @ (up[:nope] @ lat) + turned @ key) * softmax_scale(c)
                    for lat, key in seen
                ]
                values = np.array([up[nope:] @ lat for lat, _ in seen])
                mixed, _ = softmax_mix(np.array(scores), values)
                result[t, h * wide : (h + 1) * wide] = mixed
        return result @ o.T

    def block(self, request: Request) -> Array:
        """Hidden rows [q, d] of one request's block."""
        c, w, eps = self.config, self.weights, self.config.rms_norm_eps
        ids = [request.anchor] + [c.mask_token_id] * (self.rows - 1)
        places = [request.start + j for j in range(self.rows)]
        context = self.features(request.taps)
        x = self.embedding[ids]
        for layer in w.layers:
            kv_a, norm = exact(layer.kv_a), exact(layer.kv_a_norm)
            cached = [
                latent(row, kv_a, norm, eps, int(place), c.rope)
                for row, place in zip(context, request.positions, strict=True)
            ]
            normed = [rms_norm(row, exact(layer.input_norm), eps) for row in x]
            x = x + self.attention(layer, np.array(normed), places, cached)
            gate_up, down = exact(layer.gate_up), exact(layer.down)
            post = exact(layer.post_norm)
            x = x + [gated_mlp(rms_norm(row, post, eps), gate_up, down) for row in x]
        return np.array([rms_norm(row, exact(w.final_norm), eps) for row in x])

    def target_id(self, draft_id: int) -> int:
        d2t = self.weights.d2t
        return draft_id if d2t is None else draft_id + int(d2t[draft_id])

    def step(self, requests: Sequence[Request], follow: Any = None) -> Step:
        """Draft greedily; `follow` [R, k] are tokens to take in place of the argmax, so
        that logits after a near tie are those of the same prefix."""
        c, vocab = self.config, self.lm_head.shape[0]
        hidden = [self.block(request) for request in requests]
        shape = (len(requests), self.k)
        base, logits = np.zeros((*shape, vocab)), np.zeros((*shape, vocab))
        tokens, trust = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        for r, request in enumerate(requests):
            previous, state = request.anchor, None
            for i in range(self.k):
                h = hidden[r][i + self.offset]
                base[r, i] = self.lm_head @ h
                bias, state = markov_bias(c, self.weights.markov, h, previous, state)
                logits[r, i] = base[r, i] + bias
                if c.confidence != "none":
                    trust[r, i] = confidence(c, self.weights, h, previous)
                tokens[r, i] = self.target_id(int(np.argmax(logits[r, i])))
                previous = int(tokens[r, i] if follow is None else follow[r][i])
        shaped = np.array(hidden).reshape(len(requests), self.rows, c.hidden_size)
        certain = trust if c.confidence != "none" else None
        return Step(shaped, base, logits, certain, tokens)


def markov_bias(
    config: Any, heads: Any, h: Array, previous: int, state: Array | None
) -> tuple[Array | float, Array | None]:
    """Bias over the draft vocabulary [V] and the recurrent state [r] (rnn only)."""
    if config.markov is None:
        return 0.0, None
    before, w2 = exact(heads.w1[previous]), exact(heads.w2)
    if config.markov.kind == "vanilla":
        return w2 @ before, None
    if config.markov.kind == "gated":
        pre = exact(heads.gate_w) @ np.concatenate([h, before]) + exact(heads.gate_b)
        return w2 @ (sigmoid(pre) * before), None
    rank = len(before)
    old = np.zeros(rank) if state is None else state
    pre = exact(heads.joint_w) @ np.concatenate([old, before, h])
    pre = pre + exact(heads.joint_b)
    keep = sigmoid(pre[:rank])
    new = keep * old + (1 - keep) * np.tanh(pre[rank : 2 * rank])
    return w2 @ np.tanh(pre[2 * rank :]), new


def confidence(config: Any, weights: Any, h: Array, previous: int) -> float:
    parts = [h]
    if config.confidence == "markov":
        parts.append(exact(weights.markov.w1[previous]))
    head = weights.confidence
    logit = exact(head.weight)[0] @ np.concatenate(parts) + exact(head.bias)[0]
    return float(sigmoid(logit))
