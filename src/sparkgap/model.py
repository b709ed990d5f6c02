# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The DSpark draft model, written once over the ops, in four stages:

    taps [C, m, d_t] ── combine ──▶ features [C, d] ── store_context ──▶ cache, L layers
    ids, positions [R, q] ── block (reads the cache) ──▶ hidden [R, q, d]
    hidden, anchors ── sample ──▶ Draft: tokens [R, k], logits, confidence

Each stage works on buffers it is given and keeps none. With the reference ops this file
is the executable definition of the step, differentiable: training, the engine-free
drafter and engine plug-ins all run it.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.kv_cache import LatentCache
from sparkgap.ops import REFERENCE, OpSet
from sparkgap.ops.markov_sample import Numerics, Sampling
from sparkgap.ops.mla_decode import Extent, PagedRows
from sparkgap.ops.mla_query import QueryWeights
from sparkgap.primitives.rope import rope_table
from sparkgap.weights import DraftWeights, LayerWeights


@dataclass(frozen=True)
class Block:
    """The block side of a step: what is drafted from.

    ids, positions [R, q]: the anchor and its mask tokens, positions inside the model
    length; block_table [R, n]; extent: context_lens, block_lens [R].
    """

    ids: Tensor
    positions: Tensor
    block_table: Tensor
    extent: Extent


@dataclass(frozen=True)
class Buffers:
    """All inputs of one step: fixed addresses that an engine lends or a Drafter owns.

    taps [C, m, d_t], context_positions [C], context_slots [C] (-1: written nowhere);
    block: the rows to draft from; sampling: how to choose; cache: where context lives.
    """

    taps: Tensor
    context_positions: Tensor
    context_slots: Tensor
    block: Block
    sampling: Sampling
    cache: LatentCache


@dataclass(frozen=True)
class Draft:
    """tokens [R, k] int64; logits [R, k, Vd] before temperature, exactly what was drawn
    from, or None; confidence [R, k] fp32, or None without a head."""

    tokens: Tensor
    logits: Tensor | None
    confidence: Tensor | None


@dataclass(frozen=True)
class DraftModel:
    """Config, weights and ops of a draft; `max_positions` bounds the rotary table."""

    config: DraftConfig
    weights: DraftWeights
    max_positions: int
    ops: OpSet = field(default=REFERENCE)

    @cached_property
    def table(self) -> Tensor:
        """Rotary table [max_positions, rope] fp32, on the weights' device."""
        table = rope_table(self.config.rope, self.max_positions)
        return table.to(self.weights.context_proj.device)

    def combine(self, taps: Tensor) -> Tensor:
        """Target hidden states [C, m, d_t] → context features [C, d]."""
        w, eps = self.weights, self.config.rms_norm_eps
        if w.fc_norms:
            taps = self.ops.norm(taps, torch.stack(w.fc_norms), eps)
        return self._norm(
            self.ops.linear(taps.flatten(1), w.context_proj), w.context_norm
        )

    def context_latents(self, features: Tensor, positions: Tensor) -> Tensor:
        """features [C, d] → every layer's cache rows [L, C, kv_rank + rope]."""
        layers = self.weights.layers
        latents: Tensor = self.ops.context_kv(
            features,
            [layer.kv_a for layer in layers],
            [layer.kv_a_norm for layer in layers],
            self.config.rms_norm_eps,
            positions,
            self.table,
        )
        return latents

    def store_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, cache: LatentCache
    ) -> None:
        """Write the context rows of features [C, d] into slots [C] of every layer."""
        cache.store(self.context_latents(features, positions), slots)

    def block(
        self, block: Block, layers: tuple[Tensor, ...], kv_scales: tuple[float, ...]
    ) -> Tensor:
        """Block ids and positions over the layers' caches → hidden [R, q, d], normed.

        layers: L × [blocks, block_size, kv_rank + rope]; kv_scales: L floats.
        """
        w = self.weights
        if w.embedding is None:
            raise RuntimeError(
                "the draft has no embedding table: bind the target's first"
            )
        residual = self.ops.embed(block.ids.flatten(), w.embedding)
        hidden = self._norm(residual, w.layers[0].input_norm)
        after = [layer.input_norm for layer in w.layers[1:]] + [w.final_norm]
        caches = zip(layers, kv_scales, strict=True)
        for layer, (cache, scale), next_norm in zip(
            w.layers, caches, after, strict=True
        ):
            rows = PagedRows(cache, block.block_table, scale)
            hidden = self._attention(layer, hidden, block, rows)
            hidden, residual = self._add_norm(hidden, residual, layer.post_norm)
            hidden = self.ops.gated_mlp(hidden, layer.gate_up, layer.down)
            hidden, residual = self._add_norm(hidden, residual, next_norm)
        out: Tensor = hidden.unflatten(0, block.ids.shape)
        return out

    def _attention(
        self, layer: LayerWeights, hidden: Tensor, block: Block, rows: PagedRows
    ) -> Tensor:
        c = self.config
        query = QueryWeights(
            layer.q_a,
            layer.q_a_norm,
            layer.q_b,
            layer.kv_a,
            layer.kv_a_norm,
            layer.w_uk(c),
        )
        q, kv = self.ops.mla_query(
            hidden, query, c.rms_norm_eps, block.positions.flatten(), self.table
        )
        shape = block.ids.shape
        out, _ = self.ops.mla_decode(
            q.unflatten(0, shape),
            rows,
            block.extent,
            c.softmax_scale,
            c.kv_lora_rank,
            kv.unflatten(0, shape),
        )
        value = torch.einsum("rqhc,hvc->rqhv", out, layer.w_uv(c))
        reduced: Tensor = self.ops.linear(value.flatten(2).flatten(0, 1), layer.o)
        return reduced

    def drafting_rows(self, hidden: Tensor) -> Tensor:
        """The rows [R, k, d] of hidden [R, q, d] that predict; fill-in skips one."""
        return hidden if self.config.sample_from_anchor else hidden[:, 1:]

    def sample(
        self,
        hidden: Tensor,
        anchors: Tensor,
        sampling: Sampling,
        numerics: Numerics = "stock",
        return_logits: bool = True,
    ) -> Draft:
        """hidden [R, q, d], anchors [R] → tokens chosen left to right."""
        w = self.weights
        if w.lm_head is None:
            raise RuntimeError("the draft has no lm_head: bind the target's first")
        rows = self.drafting_rows(hidden)
        shape = rows.shape[:2]
        wide = torch.float32 if numerics == "fp32" else None
        base = self.ops.linear(rows.flatten(0, 1), w.lm_head, out_dtype=wide)
        drawn = self.ops.markov_sample(
            base.unflatten(0, shape),
            anchors,
            w.markov,
            sampling,
            hidden=rows,
            numerics=numerics,
            d2t=w.d2t,
            return_logits=return_logits,
        )
        return Draft(
            drawn.tokens, drawn.logits, self._confidence(rows, anchors, drawn.tokens)
        )

    def _confidence(
        self, rows: Tensor, anchors: Tensor, tokens: Tensor
    ) -> Tensor | None:
        w = self.weights
        if w.confidence is None:
            return None
        embedded = None
        if self.config.confidence == "markov" and w.markov is not None:
            previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
            embedded = self.ops.embed(previous, w.markov.w1)
        out: Tensor = self.ops.confidence(
            rows, embedded, w.confidence.weight, w.confidence.bias
        )
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = self.ops.norm(x, weight, self.config.rms_norm_eps)
        return out

    def _add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.ops.add_norm(
            x, residual, weight, self.config.rms_norm_eps
        )
        return out


def step(
    model: DraftModel,
    buffers: Buffers,
    numerics: Numerics = "stock",
    return_logits: bool = True,
) -> Draft:
    """One whole draft step over borrowed buffers: the four stages in order."""
    cache = buffers.cache
    features = model.combine(buffers.taps)
    model.store_context(
        features, buffers.context_positions, buffers.context_slots, cache
    )
    hidden = model.block(buffers.block, cache.layers, cache.kv_scales)
    return model.sample(
        hidden, buffers.block.ids[:, 0], buffers.sampling, numerics, return_logits
    )
