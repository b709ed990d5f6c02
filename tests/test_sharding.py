# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Shards of all ranks put together are bitwise the whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.sharding import check_shardable, shard, unshard, vocab_range
from sparkgap.weights import LayerWeights, canonical_tensors, random_weights
from tiny import draft_config


def config(size: int, vocab: int, drafts: int, **changes: object) -> DraftConfig:
    sizes = {
        "hidden_size": 8 * size,
        "target_hidden_size": 8 * size,
        "intermediate_size": 6 * size,
        "num_attention_heads": 2 * size,
        "vocab_size": vocab,
        "draft_vocab_size": drafts,
        "mask_token_id": 0,
    }
    return DraftConfig.from_dict(draft_config(**sizes, **changes), name="tiny")


@given(
    size=st.integers(1, 8),
    vocab=st.integers(9, 70),
    spare=st.integers(0, 8),
    kind=st.sampled_from(["vanilla", "gated", "rnn"]),
    tables=st.booleans(),
)
def test_shards_together_are_the_whole(
    size: int, vocab: int, spare: int, kind: str, tables: bool
) -> None:
    c = config(size, vocab, vocab - spare, markov_head_type=kind, fc_norm=True)
    weights = random_weights(c)
    if not tables:
        object.__setattr__(weights, "embedding", None)
        object.__setattr__(weights, "lm_head", None)
    want = canonical_tensors(weights)
    got = canonical_tensors(unshard([shard(weights, c, i, size) for i in range(size)]))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@given(
    size=st.integers(1, 8),
    vocab=st.integers(9, 70),
    spare=st.integers(0, 8),
)
def test_shards_have_their_share(size: int, vocab: int, spare: int) -> None:
    """Of everything a rank works on; what the ranks share is the very same tensor."""
    drafts = vocab - spare
    c = config(size, vocab, drafts)
    weights = random_weights(c)
    for rank in range(size):
        part = shard(weights, c, rank, size)
        first, end = vocab_range(drafts, rank, size)
        assert part.markov is not None
        assert weights.markov is not None
        assert part.lm_head is not None
        assert part.embedding is not None
        assert part.lm_head.shape == (end - first, c.hidden_size)
        assert part.markov.w2.shape == (end - first, 4)
        start, stop = vocab_range(vocab, rank, size)
        assert part.embedding.shape == (stop - start, c.hidden_size)
        assert part.context_proj.shape == (8, 16 * size)
        layer, whole = part.layers[1], weights.layers[1]
        assert layer.q_b.shape == (2 * 16, 16)
        assert layer.w_uk(c).shape == (2, 8, 16)
        assert torch.equal(layer.w_uv(c), whole.w_uv(c)[2 * rank : 2 * rank + 2])
        assert layer.o.shape == (8 * size, 2 * 8)
        assert layer.gate_up.shape == (2 * 6, 8 * size)
        assert layer.down.shape == (8 * size, 6)
        assert layer.q_a is whole.q_a
        assert layer.kv_a is whole.kv_a
        assert part.markov.w1 is weights.markov.w1
        assert part.confidence is weights.confidence
        assert part.d2t is weights.d2t


@given(vocab=st.integers(0, 300), size=st.integers(1, 16))
def test_every_row_has_one_owner(vocab: int, size: int) -> None:
    rows = [row for i in range(size) for row in range(*vocab_range(vocab, i, size))]
    assert rows == list(range(vocab))
    sizes = [b - a for a, b in (vocab_range(vocab, i, size) for i in range(size))]
    assert max(sizes) == -(-vocab // size)
    assert sizes == sorted(sizes, reverse=True)


def test_the_last_ranks_may_be_short_or_empty() -> None:
    assert [vocab_range(9, i, 8) for i in (3, 4, 5, 7)] == [
        (6, 8),
        (8, 9),
        (9, 9),
        (9, 9),
    ]


def test_shards_are_views() -> None:
    c = config(4, 40, 40)
    weights = random_weights(c)
    part = shard(weights, c, 2, 4)
    pairs = [
        (part.context_proj, weights.context_proj),
        (part.layers[0].q_b, weights.layers[0].q_b),
        (part.layers[1].down, weights.layers[1].down),
        (part.layers[1].o, weights.layers[1].o),
        (part.lm_head, weights.lm_head),
        (part.layers[0].kv_a, weights.layers[0].kv_a),
    ]
    for mine, whole in pairs:
        assert mine is not None
        assert whole is not None
        storage = whole.untyped_storage()
        assert mine.untyped_storage().data_ptr() == storage.data_ptr()


def test_ranks_partial_sums_are_the_layers_output() -> None:
    """Columns of o and down meet rows of kv_b and gate_up: ranks' outputs add up."""
    c = config(4, 40, 40)
    weights = random_weights(c, dtype=torch.float64)
    x = torch.randn(3, c.hidden_size, dtype=torch.float64)

    def mlp(layer: LayerWeights) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def values(layer: LayerWeights) -> Tensor:
        latent = x[:, : c.kv_lora_rank]
        heads = torch.einsum("tc,hvc->thv", latent, layer.w_uv(c))
        return F.linear(heads.flatten(1), layer.o)

    parts = [shard(weights, c, i, 4).layers[0] for i in range(4)]
    for part in (mlp, values):
        total = torch.stack([part(layer) for layer in parts]).sum(0)
        torch.testing.assert_close(total, part(weights.layers[0]))


def test_ranks_rows_are_the_whole_output() -> None:
    """context_proj and lm_head, whose last ranks have no rows."""
    c = config(8, 41, 9)
    weights = random_weights(c, dtype=torch.float64)
    taps = torch.randn(3, 2 * c.hidden_size, dtype=torch.float64)
    hidden = torch.randn(3, c.hidden_size, dtype=torch.float64)
    parts = [shard(weights, c, i, 8) for i in range(8)]
    features = torch.cat([F.linear(taps, p.context_proj) for p in parts], dim=-1)
    torch.testing.assert_close(features, F.linear(taps, weights.context_proj))
    heads = [p.lm_head for p in parts if p.lm_head is not None]
    assert [len(head) for head in heads] == [2, 2, 2, 2, 1, 0, 0, 0]
    logits = torch.cat([F.linear(hidden, head) for head in heads], dim=-1)
    assert weights.lm_head is not None
    torch.testing.assert_close(logits, F.linear(hidden, weights.lm_head))


def test_no_shards_are_no_weights() -> None:
    with pytest.raises(InputError, match="one of each rank"):
        unshard([])


def test_all_that_cannot_be_shared_is_told() -> None:
    c = config(4, 40, 40)
    with pytest.raises(InputError) as caught:
        shard(random_weights(c), c, 0, 3)
    text = str(caught.value)
    for size in ("hidden_size 32", "num_attention_heads 8"):
        assert f"{size} is not a multiple of 3" in text
    assert "intermediate_size" not in text, "24 is a multiple of 3"
    assert "choose a size that divides all of them" in text
    with pytest.raises(InputError, match="at least 1"):
        check_shardable(c, 0)
    for rank in (-1, 4):
        with pytest.raises(InputError, match="wanted 0 to 3"):
            shard(random_weights(c), c, rank, 4)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("part", "told"),
    [("lm_head", "lm_head"), ("embedding", "embedding"), ("markov", "Markov head")],
)
def test_a_part_that_one_rank_lacks_is_told(rank: int, part: str, told: str) -> None:
    c = config(2, 41, 41)
    shards = [shard(random_weights(c), c, i, 2) for i in range(2)]
    lacking: dict[str, Any] = {part: None}
    shards[rank] = replace(shards[rank], **lacking)
    with pytest.raises(InputError, match=f"ranks {rank} hold no {told}"):
        unshard(shards)


def test_a_shard_is_not_cut_again() -> None:
    c = config(4, 40, 40)
    with pytest.raises(InputError, match="has 16 rows, wanted hidden_size 32"):
        shard(shard(random_weights(c), c, 0, 2), c, 0, 2)
