# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Shards of all ranks put together are bitwise the whole."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.sharding import check_shardable, shard, unshard, vocab_range
from sparkgap.weights import canonical_tensors, random_weights
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

    def mlp(layer):  # type: ignore[no-untyped-def]
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    def values(layer):  # type: ignore[no-untyped-def]
        latent = x[:, : c.kv_lora_rank]
        heads = torch.einsum("tc,hvc->thv", latent, layer.w_uv(c))
        return F.linear(heads.flatten(1), layer.o)

    parts = [shard(weights, c, i, 4).layers[0] for i in range(4)]
    for part in (mlp, values):
        total = sum(part(layer) for layer in parts)
        torch.testing.assert_close(total, part(weights.layers[0]))


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
