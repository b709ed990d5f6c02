# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A draft's tensors: their names and shapes, their views, and random ones."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.config import DraftConfig
from sparkgap.weights import (
    assemble,
    canonical_tensors,
    expected_tensors,
    optional_tensors,
    random_weights,
)
from tiny import draft_config

KINDS: dict[str, dict[str, object]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence of hidden": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "fc_norm": {"fc_norm": True},
    "reduced vocabulary": {"draft_vocab_size": 90},
}


def config(**changes: object) -> DraftConfig:
    return DraftConfig.from_dict(draft_config(**changes), name="tiny")


def shapes_of(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_the_published_checkpoint_has_these_tensors() -> None:
    """Inferact/Kimi-K3-DSpark, revision cf6b824: 68 tensors, its embedding included."""
    c = DraftConfig.preset("kimi-k3")
    shapes = expected_tensors(c)
    shapes["embed_tokens.weight"] = optional_tensors(c)["embed_tokens.weight"]
    assert len(shapes) == 68
    assert sum(math.prod(shape) for shape in shapes.values()) == 3_562_312_961
    attn = "layers.4.self_attn."
    some = {
        "context_proj.weight": (7168, 35840),
        f"{attn}q_b_proj.weight": (12288, 1536),
        f"{attn}kv_a_proj_with_mqa.weight": (576, 7168),
        f"{attn}kv_b_proj.weight": (16384, 512),
        f"{attn}o_proj.weight": (7168, 8192),
        "layers.0.mlp.down_proj.weight": (7168, 14336),
        "markov_head.markov_w2.weight": (163840, 256),
        "confidence_head.proj.weight": (1, 7424),
    }
    assert {name: shapes[name] for name in some} == some


def test_heads_and_norms_have_these_shapes() -> None:
    d, r, taps = 32, 4, 2
    gated = expected_tensors(config(markov_head_type="gated"))
    assert gated["markov_head.gate_proj.weight"] == (r, d + r)
    assert gated["markov_head.gate_proj.bias"] == (r,)
    rnn = expected_tensors(config(markov_head_type="rnn"))
    assert rnn["markov_head.joint_proj.weight"] == (3 * r, 2 * r + d)
    assert rnn["markov_head.joint_proj.bias"] == (3 * r,)
    hidden = expected_tensors(config(confidence_head_with_markov=False))
    assert hidden["confidence_head.proj.weight"] == (1, d)
    norms = {name for name in expected_tensors(config(fc_norm=True)) if "fc_" in name}
    assert norms == {f"fc_norm.{i}.weight" for i in range(taps)}
    reduced = config(draft_vocab_size=90)
    assert expected_tensors(reduced)["d2t"] == (90,)
    assert expected_tensors(reduced)["markov_head.markov_w2.weight"] == (90, r)
    assert optional_tensors(reduced)["lm_head.weight"] == (90, d)
    assert "d2t" not in expected_tensors(config())


@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
def test_names_and_places_are_inverse(change: dict[str, object]) -> None:
    """A tensor goes to one place and comes back under its name, bit for bit."""
    c = config(**change)
    shapes = expected_tensors(c) | optional_tensors(c)
    tensors = {
        name: torch.full(shape, i) if name == "d2t" else torch.full(shape, float(i))
        for i, (name, shape) in enumerate(shapes.items())
    }
    back = canonical_tensors(assemble(tensors, c))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_gate_rows_come_first() -> None:
    c = config()
    tensors = canonical_tensors(random_weights(c))
    gate, up = (tensors[f"layers.1.mlp.{half}_proj.weight"] for half in ("gate", "up"))
    joined = assemble(tensors, c).layers[1].gate_up
    assert torch.equal(joined[: c.intermediate_size], gate)
    assert torch.equal(joined[c.intermediate_size :], up)


def test_keys_and_values_are_views_of_the_latent_projection() -> None:
    c = config(qk_nope_head_dim=6, v_head_dim=10)
    layer = random_weights(c).layers[0]
    w_uk, w_uv = layer.w_uk(c), layer.w_uv(c)
    assert w_uk.shape == (c.num_heads, 6, c.kv_lora_rank)
    assert w_uv.shape == (c.num_heads, 10, c.kv_lora_rank)
    for head in range(c.num_heads):
        assert torch.equal(w_uk[head], layer.kv_b[16 * head : 16 * head + 6])
        assert torch.equal(w_uv[head], layer.kv_b[16 * head + 6 : 16 * (head + 1)])
    place = layer.kv_b.untyped_storage().data_ptr()
    assert w_uk.untyped_storage().data_ptr() == place
    assert w_uv.untyped_storage().data_ptr() == place


@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
def test_random_weights_are_all_there_and_all_different(
    change: dict[str, object],
) -> None:
    c = config(**change)
    named = canonical_tensors(random_weights(c))
    assert shapes_of(named) == expected_tensors(c) | optional_tensors(c)
    named.pop("d2t", None)
    firsts = [float(tensor.flatten()[0]) for tensor in named.values()]
    assert len(set(firsts)) == len(firsts)
    for name, tensor in named.items():
        assert tensor.unique().numel() > 0.9 * tensor.numel(), name


def test_a_seed_stands_for_its_weights() -> None:
    c = config(markov_head_type="rnn", fc_norm=True, draft_vocab_size=90)
    one, again, two = (canonical_tensors(random_weights(c, seed=s)) for s in (1, 1, 2))
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name]), name
        assert name == "d2t" or not torch.equal(tensor, two[name]), name


def test_random_weights_keep_activations_near_one() -> None:
    c = config(hidden_size=256, target_hidden_size=256, intermediate_size=512)
    weights = random_weights(c)
    for norm in (weights.context_norm, weights.final_norm, weights.layers[0].q_a_norm):
        assert 0.9 < norm.mean() < 1.1
        assert 0 < norm.std() < 0.3
    x = torch.randn(64, c.num_taps * 256, generator=torch.Generator().manual_seed(99))
    assert 0.8 < (x @ weights.context_proj.T).std() < 1.25
    assert weights.embedding is not None
    assert 0.8 < weights.embedding.std() < 1.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_random_weights_have_the_type_asked_for(dtype: torch.dtype) -> None:
    named = canonical_tensors(random_weights(config(draft_vocab_size=90), dtype=dtype))
    assert named.pop("d2t").dtype == torch.int64
    assert {tensor.dtype for tensor in named.values()} == {dtype}


@given(vocab=st.integers(8, 300), share=st.floats(0, 1))
def test_random_d2t_leads_into_the_vocabulary(vocab: int, share: float) -> None:
    """Each target id at most once, whether or not the vocabularies divide."""
    drafts = 1 + int(share * (vocab - 2))
    c = config(vocab_size=vocab, draft_vocab_size=drafts, mask_token_id=0)
    d2t = random_weights(c).d2t
    assert d2t is not None
    targets = (torch.arange(drafts) + d2t).tolist()
    assert len(set(targets)) == drafts
    assert min(targets) >= 0
    assert max(targets) < vocab
