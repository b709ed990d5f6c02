# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Tensor-parallel shards of DraftWeights, and back.

    by rows       context_proj; q_b and kv_b by heads; gate and up each; W2, lm_head and
                  embedding by vocabulary
    by columns    o by heads; down
    replicated    everything else: norms, q_a, kv_a, W1, confidence, gated and rnn maps

A vocabulary of V rows gives rank i rows [i * n, (i + 1) * n) with n = ceil(V / P): the
last ranks may be short or empty. vLLM pads V to a multiple of 64 before it divides: its
ranks are sure to hold the same rows if 64 and P divide V, as for K3's 163840 and any
power of two. Everything else must divide by P. Shards are views, but for gate_up, two
pieces of the whole. Put together in rank order they are bitwise the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.weights import DraftWeights, LayerWeights


def vocab_range(vocab: int, rank: int, size: int) -> tuple[int, int]:
    """First row and end of a rank's share of `vocab` rows."""
    share = -(-vocab // size)
    return min(rank * share, vocab), min((rank + 1) * share, vocab)


def check_shardable(config: DraftConfig, size: int) -> None:
    """Raise InputError with every size that `size` ranks cannot share."""
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
    }
    if size < 1:
        raise InputError(f"{size} tensor-parallel ranks asked for, wanted at least 1")
    problems = [
        f"{n} {v} is not a multiple of {size}" for n, v in sizes.items() if v % size
    ]
    if problems:
        raise InputError(
            f"{config.name} cannot be shared by {size} tensor-parallel ranks: "
            + "; ".join(problems)
            + "; choose a size that divides all of them"
        )


def shard(
    weights: DraftWeights, config: DraftConfig, rank: int, size: int
) -> DraftWeights:
    """Rank `rank`'s part of whole weights."""
    check_shardable(config, size)
    if len(weights.context_proj) != config.hidden_size:
        raise InputError(
            f"context_proj has {len(weights.context_proj)} rows, wanted hidden_size "
            f"{config.hidden_size}: give whole weights, not a shard, and their config"
        )
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of {size}: wanted 0 to {size - 1}")

    def rows(t: Tensor) -> Tensor:
        return t.chunk(size)[rank]

    def vocab(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        first, end = vocab_range(len(t), rank, size)
        return t[first:end]

    def layer(w: LayerWeights) -> LayerWeights:
        gate, up = w.gate_up.chunk(2)
        return replace(
            w,
            q_b=rows(w.q_b),
            kv_b=rows(w.kv_b),
            o=w.o.chunk(size, 1)[rank],
            # The two halves lie apart in the whole, so this one part is a copy.
            gate_up=torch.cat([rows(gate), rows(up)]),
            down=w.down.chunk(size, 1)[rank],
        )

    markov = weights.markov
    if markov is not None:
        first, end = vocab_range(len(markov.w2), rank, size)
        markov = replace(markov, w2=markov.w2[first:end])
    return replace(
        weights,
        context_proj=rows(weights.context_proj),
        layers=tuple(layer(w) for w in weights.layers),
        markov=markov,
        embedding=vocab(weights.embedding),
        lm_head=vocab(weights.lm_head),
    )


def unshard(shards: Sequence[DraftWeights]) -> DraftWeights:
    """The whole weights from all ranks' shards in rank order."""
    if not shards:
        raise InputError("no shards to put together, wanted one of each rank")
    first = shards[0]

    def joined(pick: Callable[[DraftWeights], Tensor], dim: int = 0) -> Tensor:
        return torch.cat([pick(s) for s in shards], dim)

    def optional(
        name: str, pick: Callable[[DraftWeights], Tensor | None]
    ) -> Tensor | None:
        parts = [pick(s) for s in shards]
        found = [p for p in parts if p is not None]
        absent = [str(rank) for rank, p in enumerate(parts) if p is None]
        if found and absent:
            raise InputError(
                f"the shards of ranks {', '.join(absent)} hold no {name}, the others "
                "do; give every rank's shard of the same weights"
            )
        return torch.cat(found) if found else None

    def layer(i: int) -> LayerWeights:
        halves = [s.layers[i].gate_up.chunk(2) for s in shards]
        return replace(
            first.layers[i],
            q_b=joined(lambda s: s.layers[i].q_b),
            kv_b=joined(lambda s: s.layers[i].kv_b),
            o=joined(lambda s: s.layers[i].o, 1),
            gate_up=torch.cat([h[0] for h in halves] + [h[1] for h in halves]),
            down=joined(lambda s: s.layers[i].down, 1),
        )

    w2 = optional("Markov head", lambda s: s.markov.w2 if s.markov else None)
    markov = first.markov
    if markov is not None and w2 is not None:
        markov = replace(markov, w2=w2)
    return replace(
        first,
        context_proj=joined(lambda s: s.context_proj),
        layers=tuple(layer(i) for i in range(len(first.layers))),
        markov=markov,
        embedding=optional("embedding", lambda s: s.embedding),
        lm_head=optional("lm_head", lambda s: s.lm_head),
    )
