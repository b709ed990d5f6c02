# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Small drafts and batches of them: config, weights and a paged cache full of poison,
as the model takes them and as the oracle does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cases import ABSURD, ROPES, rand
from oracle import Request, exact
from sparkgap import ops
from sparkgap.config import DraftConfig, MarkovConfig
from sparkgap.kv_cache import LatentCache
from sparkgap.model import Block, Buffers, DraftModel
from sparkgap.ops.markov_sample import Sampling
from sparkgap.ops.mla_decode import Extent
from sparkgap.weights import DraftWeights, random_weights

BLOCK_SIZE = 8
MAX_POSITIONS = 512


@dataclass(frozen=True)
class Geometry:
    """What differs between the drafts; context: rows of each request, start: position
    of its first one; tap_size: magnitude of the target's hidden states."""

    heads: int = 2
    layers: int = 1
    rope: str = "k3"
    causal: bool = False
    fill_in: bool = False
    rows: int = 7
    taps: int = 3
    fc_norm: bool = False
    markov: str | None = "vanilla"
    confidence: str = "none"
    draft_vocab: int | None = None
    eps: float = 1e-5
    context: tuple[int, ...] = (9,)
    start: tuple[int, ...] = (0,)
    tap_size: float = 1.0
    seed: int = 0

    def config(self) -> DraftConfig:
        rope = ROPES[self.rope]
        vocab = 61
        return DraftConfig(
            name="test",
            hidden_size=32,
            intermediate_size=48,
            num_layers=self.layers,
            num_heads=self.heads,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=rope.dim,
            v_head_dim=10,
            vocab_size=vocab,
            draft_vocab_size=self.draft_vocab or vocab,
            rms_norm_eps=self.eps,
            max_position_embeddings=MAX_POSITIONS,
            rope=rope,
            target_hidden_size=24,
            target_num_layers=12,
            target_layer_ids=tuple(range(1, 1 + self.taps)),
            block_size=self.rows,
            mask_token_id=vocab - 2,
            causal=self.causal,
            sample_from_anchor=not self.fill_in,
            fc_norm=self.fc_norm,
            aux_hidden_stream=None,
            markov=MarkovConfig(self.markov, 6) if self.markov else None,
            confidence=self.confidence,
        )


@dataclass
class Batch:
    """A geometry's weights, its step as the model takes it and as the oracle does."""

    config: DraftConfig
    weights: DraftWeights
    buffers: Buffers
    requests: list[Request] = field(default_factory=list)

    @property
    def model(self) -> DraftModel:
        # Looked up here, so that a fault put into the set is a fault of the model.
        return DraftModel(self.config, self.weights, MAX_POSITIONS, ops.REFERENCE)


def batch(
    geometry: Geometry,
    dtype: torch.dtype = torch.float32,
    weights: DraftWeights | None = None,
) -> Batch:
    """Ragged contexts, their rows shuffled, in blocks in random places."""
    config = geometry.config()
    if weights is None:
        weights = random_weights(config, seed=geometry.seed, dtype=dtype)
    rng = np.random.default_rng(geometry.seed)
    lens, count = geometry.context, len(geometry.context)
    starts = [geometry.start[r % len(geometry.start)] for r in range(count)]
    shape = (sum(lens), config.num_taps, config.target_hidden_size)
    taps = rand(*shape, seed=geometry.seed + 1, dtype=dtype, size=geometry.tap_size)
    table, slots, blocks = _place(lens, rng)
    places = [
        start + i for start, n in zip(starts, lens, strict=True) for i in range(n)
    ]
    anchors = torch.from_numpy(rng.integers(0, config.vocab_size, count))
    q = config.block_size
    ids = torch.full((count, q), config.mask_token_id)
    ids[:, 0] = anchors
    first = torch.tensor([s + n for s, n in zip(starts, lens, strict=True)]).long()
    positions = first[:, None] + torch.arange(q)
    layer = torch.full((blocks, BLOCK_SIZE, config.latent_dim), math.nan, dtype=dtype)
    cache = LatentCache(
        tuple(layer.clone() for _ in range(config.num_layers)),
        (1.0,) * config.num_layers,
    )
    extent = Extent(torch.tensor(lens), torch.full((count,), q), config.causal)
    order = torch.from_numpy(rng.permutation(sum(lens)))
    buffers = Buffers(
        taps[order],
        torch.tensor(places, dtype=torch.int64)[order],
        torch.tensor(slots, dtype=torch.int64)[order],
        Block(ids, positions, table, extent),
        greedy(config, positions),
        cache,
    )
    result = Batch(config, weights, buffers)
    ends = np.cumsum([0, *lens])
    for r in range(count):
        mine = slice(int(ends[r]), int(ends[r + 1]))
        request = Request(
            exact(taps[mine]), places[mine], int(anchors[r]), int(first[r])
        )
        result.requests.append(request)
    return result


def greedy(config: DraftConfig, positions: Tensor) -> Sampling:
    """Temperature 0 for every request; sampled positions as the layout has them."""
    count = positions.shape[0]
    sampled = positions + 1 if config.sample_from_anchor else positions[:, 1:]
    return Sampling(torch.zeros(count), torch.zeros(count, dtype=torch.int64), sampled)


def _place(
    lens: Sequence[int], rng: np.random.Generator
) -> tuple[Tensor, list[int], int]:
    """Random blocks for each request: block table, slot of each row, block count."""
    need = [-(-n // BLOCK_SIZE) for n in lens]
    blocks = 1 + sum(need) + 2
    free = list(1 + rng.permutation(blocks - 1))
    columns = max(need, default=0) + 1
    absurd = rng.choice(ABSURD, size=(len(lens), columns))
    table = torch.tensor(absurd.tolist(), dtype=torch.int32).view(len(lens), columns)
    slots = []
    for r, rows in enumerate(lens):
        for i in range(need[r]):
            table[r, i] = int(free.pop())
        slots += [
            int(table[r, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE
            for i in range(rows)
        ]
    return table, slots, blocks


def with_ties(weights: Any) -> Any:
    """Weights in which ids 2i and 2i + 1 always score the same."""
    lm_head, markov = weights.lm_head.clone(), weights.markov
    lm_head[1::2] = lm_head[: len(lm_head) - 1 : 2]
    w2 = markov.w2.clone()
    w2[1::2] = w2[: len(w2) - 1 : 2]
    return replace(weights, lm_head=lm_head, markov=replace(markov, w2=w2))
