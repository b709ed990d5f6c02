# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Drafter: the engine-free draft step. Read this first.

It owns the weights, the paged cache and the block tables, and runs the four stages of
`model.py`:

    slots = drafter.slots(request, positions)        # [C]; hands out cache blocks
    drafter.add_context(taps, positions, slots)      # [C, m, d_t] into the cache
    draft = drafter.propose(batch)                   # block, sample → Draft
    drafter.release(request)

Invariant: the cache holds context rows only, those of target positions before each
request's anchor. A block's own rows are attended beside the cache and never stored, so
proposing changes nothing and nothing need be undone after a rejection: the next context
rows simply follow the last accepted ones.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sparkgap.checkpoint import load_weights
from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.kv_cache import BlockTables, LatentCache
from sparkgap.model import Block, Draft, DraftModel
from sparkgap.ops.markov_sample import Numerics, Sampling
from sparkgap.ops.mla_decode import Extent
from sparkgap.primitives import packed
from sparkgap.weights import DraftWeights

BLOCK_SIZE = 64


@dataclass(frozen=True)
class DraftBatch:
    """R requests to draft for.

    requests: R distinct keys; anchors [R] int64: each one's last token; positions [R]
    int64: where that token stands, so that context covers the positions before it;
    temperatures [R] fp32, 0 = greedy; seeds [R] int64.
    """

    requests: Sequence[Hashable]
    anchors: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor


class Drafter:
    """Drafts k tokens at a time for up to `max_requests` requests.

    Raises InputError for weights without embedding or lm_head (they belong to the
    target and must be given), and for limits that the config cannot serve.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        *,
        max_requests: int = 8,
        max_model_len: int | None = None,
        num_drafts: int | None = None,
        numerics: Numerics = "stock",
    ) -> None:
        self.config = _with_drafts(config, num_drafts)
        self.numerics = numerics
        self.max_requests = max_requests
        self.max_model_len = _model_len(config, max_model_len)
        _check_bound(config, weights)
        blocks = 1 + max_requests * -(-self.max_model_len // BLOCK_SIZE)
        self._tables = BlockTables(blocks, BLOCK_SIZE)
        like = weights.context_proj
        self.cache = LatentCache(
            tuple(
                like.new_zeros(blocks, BLOCK_SIZE, config.latent_dim)
                for _ in range(config.num_layers)
            ),
            (1.0,) * config.num_layers,
        )
        if numerics == "stock" and packed.can_pack(weights.context_proj):
            weights = _packed(weights, max_requests * config.block_size)
        self.model = DraftModel(self.config, weights, self.max_model_len)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        embedding: Tensor | None = None,
        lm_head: Tensor | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_requests: int = 8,
        max_model_len: int | None = None,
        num_drafts: int | None = None,
    ) -> "Drafter":
        """Load a checkpoint folder (config.json, safetensors).

        embedding [V, d] and lm_head [Vd, d] are the target's; a checkpoint that holds
        its own keeps them. dtype: what to compute in, default the checkpoint's (but
        fp32 on a CPU that cannot multiply bf16). num_drafts: draft fewer tokens than
        the checkpoint's block.
        """
        config = DraftConfig.from_pretrained(path)
        _with_drafts(config, num_drafts)
        if dtype is None and not _multiplies_bf16(torch.device(device)):
            dtype = torch.float32
        weights = load_weights(path, config, dtype=dtype, device=device)
        like = weights.context_proj
        table = _bind(weights.embedding, embedding, like)
        tied = weights.lm_head is None and lm_head is embedding
        head = table if tied else _bind(weights.lm_head, lm_head, like)
        weights = replace(weights, embedding=table, lm_head=head)
        return cls(
            config,
            weights,
            max_requests=max_requests,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
        )

    @property
    def num_drafts(self) -> int:
        """k, the tokens proposed per request and step."""
        return self.config.num_drafts

    @property
    def d2t(self) -> Tensor | None:
        """Offsets [Vd] from draft to target ids of a reduced vocabulary, or None."""
        return self.model.weights.d2t

    def slots(self, request: Hashable, positions: Tensor) -> Tensor:
        """Cache slots [C] int64 for consecutive positions [C] of one request.

        The first call fixes where the request's context starts. Later ones follow on or
        go back; going back forgets what lay behind.
        """
        if positions.numel() == 0:
            return positions.long()
        first, count = int(positions[0]), positions.numel()
        if not torch.equal(positions.cpu(), torch.arange(first, first + count)):
            raise InputError(
                f"request {request!r}: positions must be consecutive, "
                f"got {positions.tolist()[:8]}…"
            )
        if first < 0 or first + count > self.max_model_len:
            raise InputError(
                f"request {request!r}: positions {first} to {first + count - 1} do not "
                f"lie in 0 to {self.max_model_len - 1}; raise max_model_len"
            )
        return torch.tensor(
            self._tables.extend(request, first, count), device=positions.device
        )

    @torch.inference_mode()
    def add_context(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store context rows at positions [C] into slots [C] (-1: nowhere).

        hidden [C, m, d_t]: the tapped target layers' outputs, in the config's order.

        Rows of several requests may be mixed, a prompt may come in chunks.
        """
        c = self.config
        want = (positions.numel(), c.num_taps, c.target_hidden_size)
        if tuple(hidden.shape) != want or slots.shape != positions.shape:
            raise InputError(
                f"context needs hidden [C, taps, d] = {list(want)} and slots [C], got "
                f"{list(hidden.shape)} and {list(slots.shape)}"
            )
        if not positions.numel():
            return
        features = self.model.combine(hidden.to(self.model.weights.context_proj.dtype))
        self.model.store_context(features, positions, slots, self.cache)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch, *, return_logits: bool = True) -> Draft:
        """Draft k tokens for each request; their order and company do not matter.

        k tokens are drafted at the model length too; block rows past it are then
        neither attended nor given a position beyond it.
        """
        self._check(batch)
        c, last = self.config, self.max_model_len - 1
        offsets = torch.arange(c.block_size)
        reach = batch.positions[:, None] + offsets
        ids = torch.full(reach.shape, c.mask_token_id)
        ids[:, 0] = batch.anchors
        context = [
            self._tables.context_len(request, position)
            for request, position in zip(
                batch.requests, batch.positions.tolist(), strict=True
            )
        ]
        device = self.cache.layers[0].device
        extent = Extent(
            torch.tensor(context, dtype=torch.int64).to(device),
            (last + 1 - batch.positions).clamp(max=c.block_size).to(device),
            c.causal,
        )
        block = Block(
            ids.to(device),
            reach.clamp(max=last).to(device),
            self._tables.table(batch.requests).to(device),
            extent,
        )
        hidden = self.model.block(block, self.cache.layers, self.cache.kv_scales)
        # A fill-in row predicts its own position, an anchor-first row the next one.
        sampled = reach + 1 if c.sample_from_anchor else reach[:, 1:]
        sampling = Sampling(
            batch.temperatures.to(device), batch.seeds.to(device), sampled.to(device)
        )
        return self.model.sample(
            hidden, block.ids[:, 0], sampling, self.numerics, return_logits
        )

    def release(self, request: Hashable) -> None:
        """Forget a request and free its cache blocks; unknown ones are ignored."""
        self._tables.release(request)

    def _check(self, batch: DraftBatch) -> None:
        count = len(batch.requests)
        problems = []
        if count > self.max_requests:
            problems.append(f"{count} requests, max_requests is {self.max_requests}")
        if len(set(batch.requests)) != count:
            problems.append("a request stands in the batch twice")
        for name in ("anchors", "positions", "temperatures", "seeds"):
            shape = list(getattr(batch, name).shape)
            if shape != [count]:
                problems.append(f"{name} has shape {shape}, wanted [{count}]")
        if not problems and count:
            problems += self._check_values(batch)
        if problems:
            raise InputError("cannot draft for this batch: " + "; ".join(problems))

    def _check_values(self, batch: DraftBatch) -> list[str]:
        limits = {"anchors": self.config.vocab_size, "positions": self.max_model_len}
        problems = []
        for name, limit in limits.items():
            low, high = (int(v) for v in getattr(batch, name).aminmax())
            if low < 0 or high >= limit:
                problems.append(f"{name} span {low} to {high}, wanted 0 to {limit - 1}")
        coldest = float(batch.temperatures.min())
        if not coldest >= 0 or not bool(batch.temperatures.isfinite().all()):
            problems.append("temperatures must be finite and at least 0")
        return problems


def _with_drafts(config: DraftConfig, num_drafts: int | None) -> DraftConfig:
    """The config of a narrower block: k drafts, same weights."""
    if num_drafts is None:
        return config
    if not 1 <= num_drafts <= config.num_drafts:
        raise InputError(
            f"{num_drafts} drafts asked for, {config.name} drafts 1 to "
            f"{config.num_drafts} tokens a step (its trained block)"
        )
    spare = config.num_drafts - num_drafts
    return replace(config, block_size=config.block_size - spare)


def _model_len(config: DraftConfig, max_model_len: int | None) -> int:
    limit = config.max_position_embeddings
    if max_model_len is None:
        return min(limit, 8192)
    if not 1 <= max_model_len <= limit:
        raise InputError(
            f"max_model_len is {max_model_len}, {config.name} takes 1 to {limit}"
        )
    return max_model_len


def _multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products are no slower than fp32 ones there."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _bind(own: Tensor | None, lent: Tensor | None, like: Tensor) -> Tensor | None:
    tensor = own if own is not None else lent
    return None if tensor is None else tensor.detach().to(like)


def _packed(weights: DraftWeights, rows: int) -> DraftWeights:
    """The same weights, those of the linear ops packed for `rows` rows."""

    def pack(weight: Tensor) -> Tensor:
        return packed.pack(weight, rows)

    w, layers = weights, []
    for layer in w.layers:
        names = ("q_a", "q_b", "kv_a", "o", "gate_up", "down")
        layers.append(replace(layer, **{n: pack(getattr(layer, n)) for n in names}))
    return replace(
        w,
        context_proj=pack(w.context_proj),
        layers=tuple(layers),
        markov=None if w.markov is None else replace(w.markov, w2=pack(w.markov.w2)),
        lm_head=None if w.lm_head is None else pack(w.lm_head),
    )


def _check_bound(config: DraftConfig, weights: DraftWeights) -> None:
    """Embedding and lm_head must be there and be those of the target trained for."""
    wanted = {
        "embedding": (weights.embedding, config.vocab_size),
        "lm_head": (weights.lm_head, config.draft_vocab_size),
    }
    for name, (tensor, rows) in wanted.items():
        if tensor is None:
            raise InputError(
                f"{config.name} holds no {name}: pass the target's as {name}="
            )
        if tuple(tensor.shape) != (rows, config.hidden_size):
            raise InputError(
                f"the target's {name} is {list(tensor.shape)}, {config.name} was "
                f"trained for [{rows}, {config.hidden_size}]: use the target it was "
                "trained for"
            )
