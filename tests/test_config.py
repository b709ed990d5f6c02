# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""DraftConfig: every spelling of a config.json, every refusal, and the way back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkgap.config import ConfigError, DraftConfig, MarkovConfig, RopeConfig, Yarn
from sparkgap.errors import InputError
from sparkgap.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
BASE: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "target_num_hidden_layers": 12,
    "target_layer_ids": [1, 5, 9],
    "block_size": 7,
    "mask_token_id": 99,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e6,
}


def raw(*without: str, **changed: Any) -> dict[str, Any]:
    kept = {key: value for key, value in BASE.items() if key not in without}
    return kept | changed


def read(*without: str, **changed: Any) -> DraftConfig:
    return DraftConfig.from_dict(raw(*without, **changed), name="test")


def problems(*without: str, **changed: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(*without, **changed)
    return caught.value.problems


def problem(*without: str, **changed: Any) -> str:
    (only,) = problems(*without, **changed)
    return only


def test_defaults():
    config = read()
    assert config.name == "test"
    assert config.draft_vocab_size == 100
    assert config.target_hidden_size == 64
    # DeepseekV3Config's, as in vLLM, though published drafts all write 1e-5.
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(8, 50000.0, None)
    assert (config.causal, config.sample_from_anchor) == (False, True)
    assert (config.fc_norm, config.aux_hidden_stream) == (False, None)
    assert (config.markov, config.confidence) == (None, "none")


def test_derived_sizes():
    config = read()
    assert config.num_taps == 3
    assert config.num_drafts == 7
    assert config.qk_head_dim == 24
    assert config.latent_dim == 40
    assert config.softmax_scale == 24**-0.5
    assert read(sample_from_anchor=False).num_drafts == 6


# Keys taken out, keys put in, the field they are for and its value.
TAPS, MASK, BLOCK = "target_layer_ids", "mask_token_id", "block_size"
SPELLINGS: list[tuple[str, dict[str, Any], str, Any]] = [
    (TAPS, {"target_layer_ids": [0, 4]}, TAPS, (0, 4)),
    (TAPS, {"dspark_target_layer_ids": [0, 4]}, TAPS, (0, 4)),
    (TAPS, {"dflash_config": {"target_layer_ids": [0, 4]}}, TAPS, (0, 4)),
    (TAPS, {"eagle_aux_hidden_state_layer_ids": [1, 5]}, TAPS, (0, 4)),
    (TAPS, {"aux_hidden_state_layer_ids": [1, 5]}, TAPS, (0, 4)),
    (TAPS, {"dflash_config": {"layer_ids": [1, 5]}}, TAPS, (0, 4)),
    (TAPS, {"eagle_config": {"layer_ids": [1, 5]}}, TAPS, (0, 4)),
    (MASK, {"mask_token_id": 0}, MASK, 0),
    (MASK, {"dflash_config": {"mask_token_id": 7}}, MASK, 7),
    (MASK, {"ptd_token_id": 7}, MASK, 7),
    (MASK, {"pard_token": 7}, MASK, 7),
    (MASK, {"dspark_noise_token_id": 7}, MASK, 7),
    ("", {"markov_rank": 16}, "markov", MarkovConfig("vanilla", 16)),
    (
        "",
        {"dflash_config": {"markov_rank": 16}, "markov_head_type": "gated"},
        "markov",
        MarkovConfig("gated", 16),
    ),
    (
        "",
        {"dflash_config": {"markov_rank": 16, "markov_head_type": "gated"}},
        "markov",
        MarkovConfig("gated", 16),
    ),
    (
        "",
        {"markov_rank": 16, "markov_head_type": "rnn"},
        "markov",
        MarkovConfig("rnn", 16),
    ),
    ("", {"markov_rank": 0, "markov_head_type": "vanilla"}, "markov", None),
    (BLOCK, {"block_size": 5}, BLOCK, 5),
    (BLOCK, {"dspark_block_size": 5}, BLOCK, 5),
    (BLOCK, {"n_predict": 5}, BLOCK, 5),
    (BLOCK, {"dflash_config": {"block_size": 5}}, BLOCK, 5),
    (BLOCK, {"eagle_config": {"block_size": 5}}, BLOCK, 5),
    (BLOCK, {"block_size": 5, "n_predict": 3}, BLOCK, 5),
    ("", {"rope_parameters": YARN}, "rope", RopeConfig(8, 1e6, Yarn(32, 64))),
    (
        "",
        {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e4},
        "rope",
        RopeConfig(8, 1e6, Yarn(32, 64)),
    ),
    (
        "",
        {
            "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
            "rope_theta": 1e4,
        },
        "rope",
        RopeConfig(8, 1e4, Yarn(32, 64)),
    ),
    (
        "",
        {"rope_scaling": {**YARN, "rope_type": None, "type": "deepseek_yarn"}},
        "rope",
        RopeConfig(8, 1e6, Yarn(32, 64)),
    ),
    ("", {"rope_scaling": None, "rope_theta": 1e4}, "rope", RopeConfig(8, 1e4)),
    (
        "",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope",
        RopeConfig(8, 1e4),
    ),
    ("", {"sample_from_anchor": False}, "sample_from_anchor", False),
    ("", {"sample_from_anchor": True}, "sample_from_anchor", True),
    (
        "",
        {"dflash_config": {"sample_from_anchor": False}},
        "sample_from_anchor",
        False,
    ),
    ("", {"dspark_bonus_anchor": True}, "sample_from_anchor", False),
    ("", {"dspark_bonus_anchor": False}, "sample_from_anchor", True),
    ("", {"sliding_window": None}, "num_layers", 2),
    ("", {"sliding_window": 0}, "num_layers", 2),
    ("", {"sliding_window": -1}, "num_layers", 2),
    ("", {"sliding_window": False}, "num_layers", 2),
    ("", {"layer_types": ["full_attention"] * 2}, "causal", False),
    ("", {"layer_types": ["full_attention"] * 2, "is_causal": True}, "causal", True),
    ("", {"is_causal": True}, "causal", True),
    ("", {"is_causal": False, "dflash_config": {"causal": True}}, "causal", False),
    ("", {"is_causal": None, "dflash_config": {"causal": True}}, "causal", True),
    ("", {"dflash_config": {"causal": True}}, "causal", True),
    ("", {"fc_norm": True}, "fc_norm", True),
    ("", {"aux_hidden_stream": "attn_res"}, "aux_hidden_stream", "attn_res"),
    ("", {"aux_hidden_stream": "none"}, "aux_hidden_stream", None),
    ("", {"draft_vocab_size": 40}, "draft_vocab_size", 40),
    ("", {"num_target_layers": 3}, "num_taps", 3),
    ("", {"enable_confidence_head": True}, "confidence", "hidden"),
    (
        "",
        {
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": 4,
        },
        "confidence",
        "markov",
    ),
    ("", {"confidence_head_with_markov": True}, "confidence", "none"),
    ("", {"dflash_config": {"enable_confidence_head": True}}, "confidence", "hidden"),
    ("", {"logit_scale": 1.0, "dspark_draft_topk": None}, "num_layers", 2),
    ("", {"quantization_config": None, "dflash_config": None}, "num_layers", 2),
    ("model_type", {}, "num_heads", 4),
    ("architectures", {}, "num_heads", 4),
]


@pytest.mark.parametrize(("without", "changed", "field", "value"), SPELLINGS)
def test_spellings(without, changed, field, value):
    assert getattr(read(without, **changed), field) == value


def test_the_first_in_vllms_order_counts():
    nested = {"target_layer_ids": [1], "layer_ids": [9], "mask_token_id": 1}
    later = {
        "dspark_target_layer_ids": [3],
        "target_layer_ids": [4],
        "dspark_noise_token_id": 3,
        "pard_token": 4,
        "ptd_token_id": 5,
    }
    assert read(dflash_config=nested, **later).target_layer_ids == (1,)
    assert read(dflash_config=nested, **later).mask_token_id == 1
    assert read(**later).target_layer_ids == (3,)
    assert read(**later).mask_token_id == 99
    assert read("mask_token_id", **later).mask_token_id == 3
    eagle = read(
        dflash_config=nested, eagle_aux_hidden_state_layer_ids=[8, 10], **later
    )
    assert eagle.target_layer_ids == (7, 9)


SPECULATORS_LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def speculators(**changed: Any) -> dict[str, Any]:
    outer = raw(*SPECULATORS_LAYER, "model_type", "target_layer_ids")
    inner = {key: BASE[key] for key in SPECULATORS_LAYER}
    return outer | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [2, 6, 10],
        "transformer_layer_config": inner,
        **changed,
    }


def test_speculators_format():
    config = DraftConfig.from_dict(speculators(), name="test")
    assert config.hidden_size == 64
    assert config.target_layer_ids == (1, 5, 9)
    # The loader's default there; the flag counts where it is written.
    assert (config.sample_from_anchor, config.num_drafts) == (False, 6)
    written = speculators(sample_from_anchor=True, vocab_size=None)
    assert DraftConfig.from_dict(written, name="test").num_drafts == 7


def test_speculators_with_gqa_layers_are_refused():
    inner = {"model_type": "qwen3", "hidden_size": 64, "num_key_value_heads": 2}
    file = speculators(transformer_layer_config=inner)
    with pytest.raises(ConfigError, match="GQA draft .*not served yet"):
        DraftConfig.from_dict(file, name="test")


@pytest.mark.parametrize(
    ("architecture", "model_type", "family"),
    [
        ("DSparkDraftModel", "qwen3", "Qwen3"),
        ("Qwen3DSparkModel", None, "Qwen3"),
        (None, "qwen3", "Qwen3"),
        ("Gemma4DSparkModel", None, "Gemma4"),
        (None, "gemma4", "Gemma4"),
        (None, "deepseek_v4", "DeepSeek-V4"),
        ("DeepseekV4ForCausalLM", "deepseek_v41", "DeepSeek-V4"),
    ],
)
def test_other_families_are_known_and_refused(architecture, model_type, family):
    file = {
        "architectures": [architecture] if architecture else None,
        "model_type": model_type,
        "hidden_size": 7168,
    }
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(file, name="test")
    (said,) = caught.value.problems
    assert family in said
    assert "not served yet" in said
    assert "K3DSparkModel" in said


@pytest.mark.parametrize("file", [{}, {"architectures": ["LlamaForCausalLM"]}])
def test_unknown_families_are_refused(file):
    with pytest.raises(ConfigError, match="served are MLA drafts"):
        DraftConfig.from_dict(file, name="test")


# Keys taken out, keys put in, and what the one message must name.
REFUSALS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("", {"mla_use_nope": True}, ("mla_use_nope is true", "(false)")),
    ("", {"mla_use_output_gate": True}, ("mla_use_output_gate is true",)),
    ("", {"mla_use_qk_norm": True}, ("mla_use_qk_norm is true",)),
    (
        "",
        {"quantization_config": {"quant_method": "fp8"}},
        ("quantization_config", "quantised", "bf16"),
    ),
    ("", {"compression_config": {"a": 1}}, ("compression_config", "quantised")),
    ("", {"logit_scale": 0.5}, ("logit_scale is 0.5", "leave it out")),
    ("", {"dspark_draft_topk": 8}, ("dspark_draft_topk is 8", "leave it out")),
    ("", {"dflash_config": "x"}, ("dflash_config is 'x'", "an object")),
    ("", {"eagle_config": [1]}, ("eagle_config is [1]", "an object")),
    ("", {"transformer_layer_config": 3}, ("_config is 3", "an object")),
    ("", {"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "'silu'")),
    ("", {"sliding_window": 1024}, ("sliding_window is 1024", "null, 0 or -1")),
    ("", {"sliding_window": True}, ("sliding_window is True", "null, 0 or -1")),
    ("", {"sliding_window": "wide"}, ("sliding_window is 'wide'",)),
    ("", {"use_sliding_window": True}, ("use_sliding_window is true",)),
    (
        "",
        {"layer_types": ["sliding_attention"] * 2},
        ("sliding_attention", "full_attention"),
    ),
    (
        "",
        {"layer_types": ["causal_attention", "full_attention"]},
        ("layer_types holds causal_attention,", "full_attention"),
    ),
    ("", {"layer_types": "full_attention"}, ("layer_types is 'full", "a list")),
    ("", {"layer_types": 5}, ("layer_types is 5", "a list")),
    ("", {"aux_hidden_stream": "mlp"}, ("'mlp'", "'attn_res'")),
    ("", {"aux_hidden_stream": 3}, ("aux_hidden_stream is 3", "'attn_res'")),
    (
        "",
        {"markov_rank": 4, "markov_head_type": "lstm"},
        ("'lstm'", "'vanilla' or 'gated' or 'rnn'"),
    ),
    ("", {"markov_rank": -1}, ("markov_rank is -1", "from 0 to")),
    ("", {"markov_rank": True}, ("markov_rank is True", "whole number")),
    ("", {"hidden_size": None}, ("hidden_size is None", "set hidden_size")),
    ("", {"hidden_size": "64"}, ("hidden_size is '64'", "whole number")),
    ("", {"hidden_size": 64.0}, ("hidden_size is 64.0", "whole number")),
    ("", {"num_attention_heads": 0}, ("num_attention_heads is 0", "from 1 to")),
    ("q_lora_rank", {}, ("q_lora_rank is None", "set q_lora_rank")),
    ("", {"qk_rope_head_dim": 7}, ("qk_rope_head_dim is 7", "even")),
    (BLOCK, {}, ("block_size is None", "set block_size or dspark_block_size or")),
    ("", {"block_size": 0}, ("block_size is 0", "from 1 to")),
    (
        "",
        {"block_size": 1, "sample_from_anchor": False},
        ("block_size is 1", "from 2 to"),
    ),
    (
        "",
        {"sample_from_anchor": True, "dspark_bonus_anchor": True},
        ("dspark_bonus_anchor and sample_from_anchor", "two layouts"),
    ),
    ("", {"sample_from_anchor": "yes"}, ("'yes'", "true or false")),
    ("", {"is_causal": 1}, ("is_causal is 1", "true or false")),
    (MASK, {}, ("is None", "from 0 to 99", "or ptd_token_id")),
    ("", {"mask_token_id": 100}, ("mask_token_id is 100", "0 to 99")),
    ("", {"mask_token_id": -1}, ("mask_token_id is -1", "0 to 99")),
    ("", {"mask_token_id": True}, ("mask_token_id is True", "0 to 99")),
    ("", {"mask_token_id": "<mask>"}, ("'<mask>'", "0 to 99")),
    ("", {"hidden_size": 2**31}, ("hidden_size is 2147483648", "to 2147483647")),
    ("", {"draft_vocab_size": 101}, ("draft_vocab_size is 101", "from 1 to 100")),
    (TAPS, {}, ("target_layer_ids is None", "a list")),
    ("", {TAPS: []}, ("target_layer_ids is []", "a list")),
    ("", {TAPS: [1, True]}, ("[1, True]", "a list")),
    ("", {TAPS: "1,2"}, ("'1,2'", "a list")),
    ("", {TAPS: [5, 1]}, ("[5, 1]", "strictly increasing")),
    ("", {TAPS: [1, 1]}, ("[1, 1]", "strictly increasing")),
    ("", {TAPS: [-1, 3]}, ("holds -1", "at least 0")),
    ("", {TAPS: [1, 11]}, ("holds 11", "below 11", "final")),
    (
        "",
        {"eagle_aux_hidden_state_layer_ids": [0, 3]},
        ("eagle_aux_hidden_state_layer_ids holds 0", "at least 1"),
    ),
    (
        "",
        {"aux_hidden_state_layer_ids": [3, 12]},
        ("aux_hidden_state_layer_ids holds 12", "below 12", "final"),
    ),
    ("", {"num_target_layers": 5}, ("num_target_layers is 5", "3 ids")),
    (
        "",
        {"enable_confidence_head": True, "confidence_head_with_markov": True},
        ("confidence_head_with_markov is true", "markov_rank is 0"),
    ),
    ("", {"rms_norm_eps": 0}, ("rms_norm_eps is 0", "above 0")),
    ("", {"rms_norm_eps": math.nan}, ("rms_norm_eps is nan", "above 0")),
    ("", {"rms_norm_eps": 10**400}, ("rms_norm_eps is 1000", "above 0")),
    ("", {"rope_theta": math.inf}, ("rope_theta is inf", "above 0")),
    ("", {"rope_scaling": "yarn"}, ("rope_scaling is 'yarn'", "an object")),
    ("", {"rope_scaling": {"type": "linear"}}, ("'linear'", "'yarn'")),
    ("", {"rope_parameters": {**YARN, "factor": None}}, ("factor is None", "above 0")),
    (
        "",
        {"rope_parameters": {**YARN, "mscale": -1}},
        ("rope_parameters.mscale is -1", "at least 0"),
    ),
    (
        "",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": None}},
        ("original_max_position_embeddings is None", "whole number"),
    ),
]


# Every key that the tables name, at the top and one level down.
TABLED = [changed for _, changed, *_ in (*SPELLINGS, *REFUSALS)]
KEYS = set(BASE).union(*TABLED)
INNER_KEYS = {
    key
    for changed in TABLED
    for value in changed.values()
    if isinstance(value, dict)
    for key in value
}


@pytest.mark.parametrize(("without", "changed", "said"), REFUSALS)
def test_refusals_name_the_value_and_the_way_out(without, changed, said):
    message = problem(without, **changed)
    for text in said:
        assert text in message


def test_the_last_layer_but_one_can_be_tapped():
    assert read(target_layer_ids=[0, 10]).target_layer_ids == (0, 10)
    assert read(aux_hidden_state_layer_ids=[1, 11]).target_layer_ids == (0, 10)
    unknown = read("target_num_hidden_layers", target_layer_ids=[500])
    assert unknown.target_num_layers is None


def test_all_problems_in_one_error():
    changed = {
        "hidden_act": "gelu",
        "sliding_window": 512,
        "mask_token_id": 100,
        "target_layer_ids": [3, 2],
        "block_size": None,
        "rms_norm_eps": -1,
    }
    found = problems(**changed)
    assert len(found) == len(changed)
    with pytest.raises(InputError) as caught:
        read(**changed)
    assert str(caught.value).startswith("cannot serve the draft test:\n  - ")
    for key in changed:
        assert key in str(caught.value)


def test_a_missing_vocabulary_is_one_problem():
    assert "vocab_size is None" in problem("vocab_size", draft_vocab_size=40)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "draft_vocab_size",
        "target_num_hidden_layers",
        "qk_rope_head_dim",
        "markov_rank",
    ],
)
def test_a_wrong_size_is_one_problem(key):
    heads = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    assert f"{key} is 'x'" in problem(**{"markov_rank": 4, **heads, key: "x"})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(INNER_KEYS)), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), anything, min_size=1, max_size=4))
@example({"rms_norm_eps": 10**400})
def test_any_value_is_read_or_refused(changed):
    try:
        config = DraftConfig.from_dict(BASE | changed, name="test")
    except ConfigError:
        return
    file = json.loads(json.dumps(config.to_dict()))
    assert DraftConfig.from_dict(file, name="test") == config


def test_keys_about_something_else_are_ignored():
    extra = {"torch_dtype": "bfloat16", "bos_token_id": 1, "transformers_version": "5"}
    assert read(**extra) == read()


def test_yarn_factors():
    def m(mscale: float) -> float:
        return 0.1 * mscale * math.log(32) + 1

    plain = Yarn(32, 64)
    assert plain.table_scale == pytest.approx(m(1))
    assert plain.table_scale == pytest.approx(1.347, abs=1e-3)
    assert plain.softmax_correction == 1
    k3 = Yarn(32, 64, mscale=1.0, mscale_all_dim=1.0)
    assert k3.table_scale == 1
    assert k3.softmax_correction == pytest.approx(m(1) ** 2)
    assert Yarn(32, 64, attention_factor=1.0).softmax_correction == 1
    assert Yarn(1, 64).table_scale == 1
    scaled = read(rope_parameters=YARN)
    assert scaled.softmax_scale == pytest.approx(24**-0.5)
    both = read(rope_parameters=YARN | {"mscale_all_dim": 1.0})
    assert both.softmax_scale == pytest.approx(24**-0.5 * m(1) ** 2)


sizes = st.integers(1, 9)
magnitudes = st.floats(0, 4)
above_zero = st.floats(0.01, 1e7)
yarns = st.builds(
    Yarn,
    factor=above_zero,
    original_max_position=sizes,
    beta_fast=above_zero,
    beta_slow=above_zero,
    mscale=magnitudes,
    mscale_all_dim=magnitudes,
    attention_factor=st.none() | magnitudes,
)


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    dim = 2 * draw(sizes)
    vocab = draw(st.integers(2, 99))
    kinds = st.sampled_from(["vanilla", "gated", "rnn"])
    markov = draw(st.none() | st.builds(MarkovConfig, kinds, sizes))
    heads = ["none", "hidden"] + (["markov"] if markov else [])
    anchor_first = draw(st.booleans())
    taps = draw(st.sets(st.integers(0, 20), min_size=1, max_size=5))
    names = (
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
        "max_position_embeddings",
        "target_hidden_size",
    )
    return DraftConfig(
        name="test",
        **{name: draw(sizes) for name in names},
        qk_rope_head_dim=dim,
        vocab_size=vocab,
        draft_vocab_size=draw(st.integers(1, vocab)),
        rms_norm_eps=draw(above_zero),
        rope=RopeConfig(dim, draw(above_zero), draw(st.none() | yarns)),
        target_num_layers=draw(st.none() | st.integers(max(taps) + 2, 40)),
        target_layer_ids=tuple(sorted(taps)),
        block_size=draw(st.integers(1 if anchor_first else 2, 9)),
        mask_token_id=draw(st.integers(0, vocab - 1)),
        causal=draw(st.booleans()),
        sample_from_anchor=anchor_first,
        fc_norm=draw(st.booleans()),
        aux_hidden_stream=draw(st.sampled_from([None, "attn_res"])),
        markov=markov,
        confidence=draw(st.sampled_from(heads)),
    )


@given(configs())
def test_there_and_back(config):
    file = json.loads(json.dumps(config.to_dict()))
    assert DraftConfig.from_dict(file, name="test") == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = DraftConfig.preset(name)
    assert config.name == name
    assert PRESETS[name].source
    assert DraftConfig.from_dict(config.to_dict(), name=name) == config


def test_what_the_presets_say():
    k3, k31, block5 = map(
        DraftConfig.preset, ("kimi-k3", "kimi-k3.1", "kimi-k3-block5")
    )
    assert (k3.num_heads, k3.markov, k3.causal) == (
        64,
        MarkovConfig("vanilla", 256),
        False,
    )
    assert (k3.num_drafts, k3.confidence, k3.mask_token_id) == (7, "markov", 163837)
    assert (k31.num_heads, k31.markov.rank, k31.causal) == (96, 512, True)
    assert (block5.num_layers, block5.num_taps, block5.num_drafts) == (3, 3, 5)
    assert block5.causal
    with pytest.raises(InputError, match="no preset 'kimi'; there are kimi-k3"):
        DraftConfig.preset("kimi")


# Published configs. What no public source says is assumed: the layer geometry of the
# other families, and ids that only need to be in range.
INFERACT: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
    "target_hidden_size": 7168,
    "num_target_layers": 5,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "block_size": 7,
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# Speculators keep these one level down.
IN_LAYERS = {
    key: value
    for key, value in INFERACT.items()
    if key.startswith(("hidden_", "intermediate", "num_hidden", "num_a", "q_", "kv_"))
    or key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps")
}
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Inferact/Kimi-K3-DSpark": (
        {},
        {
            "num_heads": 64,
            "target_layer_ids": (2, 23, 47, 71, 89),
            "num_drafts": 7,
            "causal": False,
            "markov": MarkovConfig("vanilla", 256),
            "confidence": "markov",
            "softmax_scale": 192**-0.5 * (0.1 * math.log(32) + 1) ** 2,
        },
    ),
    "lightseekorg/kimi-k3-dspark": (
        {
            "fc_norm": True,
            "aux_hidden_stream": "attn_res",
            "target_layer_ids": [7, 31, 47, 63, 87],
            "rope_parameters": None,
            "rope_theta": 50000,
        },
        {
            "fc_norm": True,
            "aux_hidden_stream": "attn_res",
            "target_layer_ids": (7, 31, 47, 63, 87),
            "rope": RopeConfig(64, 50000.0),
            "softmax_scale": 192**-0.5,
        },
    ),
    "Inferact/Kimi-K3.1-Pro-DSpark-preview": (
        {"num_attention_heads": 96, "markov_rank": 512, "is_causal": True},
        {
            "num_heads": 96,
            "markov": MarkovConfig("vanilla", 512),
            "causal": True,
            "num_drafts": 7,
        },
    ),
    "Inferact/Kimi-K3-DSpark-Block5": (
        {
            **dict.fromkeys(IN_LAYERS),
            "transformer_layer_config": IN_LAYERS | {"num_hidden_layers": 3},
            "speculators_model_type": "dspark",
            "target_layer_ids": None,
            "num_target_layers": None,
            "aux_hidden_state_layer_ids": [3, 48, 90],
            "block_size": 5,
            "sample_from_anchor": True,
            "is_causal": True,
        },
        {
            "num_layers": 3,
            "target_layer_ids": (2, 47, 89),
            "num_drafts": 5,
            "causal": True,
        },
    ),
    "slippedJim/Kimi-K3-Draft": (
        {"mla_use_nope": None, "mla_use_output_gate": None, "hidden_act": None},
        {"num_drafts": 7, "causal": False, "confidence": "markov"},
    ),
}
GQA = {"num_key_value_heads": 16, "head_dim": 64, "hidden_size": 7168}
QWEN3, GEMMA4 = "GQA draft of the Qwen3 family", "GQA draft of the Gemma4 family"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "RadixArk/Kimi-K3-DSpark": (
        GQA | {"architectures": ["DSparkDraftModel"], "model_type": "qwen3"},
        QWEN3,
    ),
    "LithosAI/Kimi-K3.1-Pro-DSpark": (GQA | {"model_type": "qwen3"}, QWEN3),
    "novita/kimi-k2.7-code-dspark": (
        {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": GQA | {"model_type": "qwen3"},
            "aux_hidden_state_layer_ids": [1, 29, 57],
            "draft_vocab_size": 32000,
        },
        QWEN3,
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (
        GQA | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"},
        QWEN3,
    ),
    "deepseek-ai/dspark_gemma4_12b_block7": (
        {"architectures": ["Gemma4DSparkModel"]},
        GEMMA4,
    ),
    "makora-ai/gemma4-26b-a4b-dspark": (
        {"transformer_layer_config": {"model_type": "gemma4"}},
        GEMMA4,
    ),
    "deepseek-ai/DeepSeek-V4-Flash-DSpark": (
        {"model_type": "deepseek_v4", "dspark_target_layer_ids": [40, 41, 42]},
        "a DeepSeek-V4 draft",
    ),
    "RedHatAI/Kimi-K3-speculator.dspark": (
        INFERACT | {"sliding_window": 2048},
        "sliding windows are",
    ),
    "kodelow/Kimi-K3-DSpark-FP8": (
        INFERACT | {"quantization_config": {"quant_method": "fp8"}},
        "quantised drafts are",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_published_drafts_that_are_served(name):
    changed, expected = SERVED[name]
    config = DraftConfig.from_dict(INFERACT | changed, name=name)
    found = {field: getattr(config, field) for field in expected}
    assert found == {
        field: pytest.approx(value) if isinstance(value, float) else value
        for field, value in expected.items()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_published_drafts_that_are_not_served_yet(name):
    file, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(file, name=name)
    (only,) = caught.value.problems
    assert said in only
    assert "not served yet" in only


def test_an_architecture_of_nope_and_gates_is_refused_for_all_of_it():
    # NeMo AutoModel's draft of Kimi K3.
    gated = {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ"}
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(INFERACT | gated, name="nemo")
    assert len(caught.value.problems) == len(gated)


def test_the_preset_is_the_published_config():
    assert DraftConfig.from_dict(INFERACT, name="kimi-k3") == DraftConfig.preset(
        "kimi-k3"
    )


def test_the_preset_is_the_shipped_draft():
    (shipped,) = (ROOT / "models" / "sparkgap_demo").glob("*/config.json")
    config = DraftConfig.from_pretrained(shipped.parent)
    assert replace(config, name="smollm2-135m") == DraftConfig.preset("smollm2-135m")


def test_a_folder(tmp_path):
    folder = tmp_path / "some-draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE))
    config = DraftConfig.from_pretrained(folder)
    assert config.name == "some-draft"
    assert config == DraftConfig.from_dict(BASE, name="some-draft")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no config.json; give a folder"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "holds a list, wanted an object"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_broken_folders(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        DraftConfig.from_pretrained(tmp_path)


def test_a_config_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"config\.json cannot be read: .*readable"):
        DraftConfig.from_pretrained(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        DraftConfig.from_pretrained(tmp_path / "nowhere")
