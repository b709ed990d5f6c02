# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""config.json → DraftConfig: every spelling of a K3 draft's config, and its refusals.

Sources of the spellings: vLLM 0.33.0 (`transformers_utils/configs/k3_dspark.py`,
`config/speculative.py`, `v1/worker/gpu/spec_decode/utils.py`), DeepSpec, speculators
0.9, published checkpoints. Of two spellings in one file the first in vLLM's order of
look-up counts. Keys that say nothing about the draft (dtype, token ids of the
tokenizer, transformers_version, …) are ignored; a value that is known to change the
computation and is not served is refused.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal

from sparkgap.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    ConfigError,
    DraftConfig,
    MarkovConfig,
    RopeConfig,
    Yarn,
)

# Recognised families that need another model: attention with key-value heads, or MoE.
OTHER_FAMILIES = {
    "qwen3": "a GQA draft of the Qwen3 family",
    "DSparkDraftModel": "a GQA draft of the Qwen3 family",
    "Qwen3DSparkModel": "a GQA draft of the Qwen3 family",
    "gemma4": "a GQA draft of the Gemma4 family",
    "Gemma4DSparkModel": "a GQA draft of the Gemma4 family",
    "deepseek_v4": "a DeepSeek-V4 draft inside its target's checkpoint",
    "deepseek_v41": "a DeepSeek-V4 draft inside its target's checkpoint",
}
DEFAULT_THETA = 50000.0
# What vLLM's K3DSparkConfig inherits from DeepseekV3Config.
DEFAULT_EPS = 1e-6
# What a wrong size counts as, so that others are not found too large for it; no right
# one reaches it.
ANY_SIZE = 2**31
# A speculators file is told by these.
LAYER_CONFIG = "transformer_layer_config"
SPECULATORS_KEYS = {LAYER_CONFIG, "speculators_model_type"}


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the layer geometry of speculators files, which is kept one level
    down, beside the rest; what the file itself says counts before it."""
    inner = raw.get(LAYER_CONFIG)
    said = {key: value for key, value in raw.items() if value is not None}
    return {**inner, **said} if isinstance(inner, Mapping) else said


class _Reader:
    """Looks keys up and collects what is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = _flat(raw)
        self.problems: list[str] = []
        self.is_speculators = bool(SPECULATORS_KEYS & raw.keys())

    def find(self, *keys: str) -> tuple[str, Any]:
        """The first key ("a" or "nested.a") that is not null, and its value."""
        for key in keys:
            value: Any = self.raw
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return key, value
        return keys[0], None

    def integer(
        self,
        *keys: str,
        default: int | None = None,
        least: int = 1,
        most: int = ANY_SIZE - 1,
    ) -> int:
        key, value = self.find(*keys)
        if value is None and default is not None:
            return default
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or not least <= value <= most:
            self.problems.append(
                f"{key} is {value!r}, wanted a whole number from {least} to {most}: "
                f"set {' or '.join(keys)}"
            )
            return ANY_SIZE
        return int(value)

    def number(self, *keys: str, default: float | None = None) -> float:
        key, value = self.find(*keys)
        if value is None and default is not None:
            return default
        if not _is_number(value) or value <= 0:
            self.problems.append(f"{key} is {value!r}, wanted a number above 0")
            return 1.0
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        key, value = self.find(*keys)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} is {value!r}, wanted true or false")
            return default
        return value

    def choice(self, *keys: str, options: tuple[str, ...], default: str) -> str:
        key, value = self.find(*keys)
        if value is None:
            return default
        if value not in options:
            self.problems.append(
                f"{key} is {value!r}, wanted {' or '.join(map(repr, options))}"
            )
            return default
        return str(value)


def _is_number(value: Any) -> bool:
    """JSON as Python reads it also has NaN and Infinity."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def read_config(raw: Mapping[str, Any], name: str) -> DraftConfig:
    """See `DraftConfig.from_dict`."""
    other = _other_family(raw)
    if other is not None:
        raise ConfigError(name, [other])
    r = _Reader(raw)
    _refuse_unserved(r)
    hidden = r.integer("hidden_size")
    vocab = r.integer("vocab_size")
    rope_dim = r.integer("qk_rope_head_dim", least=2)
    if rope_dim % 2:
        r.problems.append(f"qk_rope_head_dim is {rope_dim}, wanted an even number")
    target_layers = _target_layers(r)
    anchor_first = _anchor_first(r)
    config = DraftConfig(
        name=name,
        hidden_size=hidden,
        intermediate_size=r.integer("intermediate_size"),
        num_layers=r.integer("num_hidden_layers"),
        num_heads=r.integer("num_attention_heads"),
        q_lora_rank=r.integer("q_lora_rank"),
        kv_lora_rank=r.integer("kv_lora_rank"),
        qk_nope_head_dim=r.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=r.integer("v_head_dim"),
        vocab_size=vocab,
        draft_vocab_size=r.integer("draft_vocab_size", default=vocab, most=vocab),
        rms_norm_eps=r.number("rms_norm_eps", default=DEFAULT_EPS),
        max_position_embeddings=r.integer("max_position_embeddings"),
        rope=_rope(r, rope_dim),
        target_hidden_size=r.integer("target_hidden_size", default=hidden),
        target_num_layers=target_layers,
        target_layer_ids=_tap_ids(r, target_layers),
        block_size=r.integer(
            "block_size",
            "dspark_block_size",
            "dflash_config.block_size",
            "eagle_config.block_size",
            "n_predict",
            least=1 if anchor_first else 2,
        ),
        mask_token_id=_mask_token(r, vocab),
        causal=_causal(r),
        sample_from_anchor=anchor_first,
        fc_norm=r.flag("fc_norm", default=False),
        aux_hidden_stream=_aux_stream(r),
        markov=_markov(r),
        confidence=_confidence(r),
    )
    if config.confidence == "markov" and config.markov is None:
        r.problems.append(
            "confidence_head_with_markov is true but markov_rank is 0: the head has no "
            "Markov embedding to read"
        )
    if r.problems:
        raise ConfigError(name, r.problems)
    return config


def _other_family(raw: Mapping[str, Any]) -> str | None:
    """Why a config that is not of the K3 family is not served, or None if it is."""
    inner = raw.get(LAYER_CONFIG)
    named = [raw, inner] if isinstance(inner, Mapping) else [raw]
    said = [name for part in named for name in _names(part)]
    served = f"served are MLA drafts ({ARCHITECTURE}, model_type {MODEL_TYPE})"
    if ARCHITECTURE in said or MODEL_TYPE in said:
        return None
    is_mla = "kv_lora_rank" in _flat(raw)
    for key in said:
        # Speculators call every draft this, whatever its layers are.
        if key in OTHER_FAMILIES and not (key == "DSparkDraftModel" and is_mla):
            return f"{key} is {OTHER_FAMILIES[key]}, not served yet; {served}"
    if is_mla:
        return None
    return (
        f"architectures and model_type say {', '.join(said) or 'nothing'} and there is "
        f"no kv_lora_rank; {served}"
    )


def _names(raw: Mapping[str, Any]) -> list[str]:
    """What a config says that it is."""
    architectures = raw.get("architectures")
    names = list(architectures) if isinstance(architectures, list) else []
    return [str(name) for name in (*names, raw.get("model_type")) if name]


def _refuse_unserved(r: _Reader) -> None:
    """Settings that change the computation and have no implementation."""
    for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm"):
        if r.flag(key, default=False):
            r.problems.append(f"{key} is true, not served: only plain MLA is (false)")
    for key in ("quantization_config", "compression_config"):
        if r.raw.get(key):
            r.problems.append(
                f"{key} is set, quantised drafts are not served yet: use the bf16 "
                "checkpoint"
            )
    for key, neutral in (("logit_scale", 1), ("dspark_draft_topk", None)):
        value = r.raw.get(key, neutral)
        if value != neutral:
            r.problems.append(f"{key} is {value!r}, not served yet: leave it out")
    for key in ("dflash_config", "eagle_config", LAYER_CONFIG):
        if not isinstance(r.raw.get(key, {}), Mapping):
            r.problems.append(f"{key} is {r.raw[key]!r}, wanted an object or null")
    r.choice("hidden_act", options=("silu",), default="silu")
    key, window = r.find("sliding_window")
    # 0, -1 and null all mean no window in published files.
    if window not in (None, 0, -1, False):
        r.problems.append(
            f"{key} is {window!r}, sliding windows are not served yet: null, 0 or -1"
        )
    if r.flag("use_sliding_window", default=False):
        r.problems.append("use_sliding_window is true, not served yet: false")
    kinds = r.find("layer_types")[1] or []
    if not isinstance(kinds, (list, tuple)):
        r.problems.append(f"layer_types is {kinds!r}, wanted a list")
        return
    odd = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if odd:
        r.problems.append(
            f"layer_types holds {', '.join(odd)}, not served yet: full_attention"
        )


def _anchor_first(r: _Reader) -> bool:
    """The layout flag; K3 files without it are anchor-first, speculators files not."""
    bonus = r.flag("dspark_bonus_anchor", default=False)
    anchor_first = r.flag(
        "sample_from_anchor",
        "dflash_config.sample_from_anchor",
        default=not (bonus or r.is_speculators),
    )
    if bonus and anchor_first:
        r.problems.append(
            "dspark_bonus_anchor and sample_from_anchor are both true, which are two "
            "layouts: set the one it was trained with"
        )
    return anchor_first


def _causal(r: _Reader) -> bool:
    """vLLM's order: is_causal, dflash_config.causal, then layer_types, of which only
    sliding_attention is causal, and that is refused: what is left is not causal."""
    return r.flag("is_causal", "dflash_config.causal", default=False)


def _aux_stream(r: _Reader) -> str | None:
    streams = ("attn_res", "none")
    stream = r.choice("aux_hidden_stream", options=streams, default="none")
    return None if stream == "none" else stream


def _mask_token(r: _Reader, vocab: int) -> int:
    return r.integer(
        "dflash_config.mask_token_id",
        "mask_token_id",
        "dspark_noise_token_id",
        "pard_token",
        "ptd_token_id",
        least=0,
        most=vocab - 1,
    )


def _target_layers(r: _Reader) -> int | None:
    key = "target_num_hidden_layers"
    return r.integer(key) if key in r.raw else None


def _tap_ids(r: _Reader, target_layers: int | None) -> tuple[int, ...]:
    """0-based layers whose output is tapped, in vLLM's order of look-up.

    Ids "as is" count from 1 (layer i's output is auxiliary state i + 1).
    """
    spellings = {
        "eagle_aux_hidden_state_layer_ids": 1,
        "aux_hidden_state_layer_ids": 1,
        "dflash_config.target_layer_ids": 0,
        "dspark_target_layer_ids": 0,
        "target_layer_ids": 0,
        "dflash_config.layer_ids": 1,
        "eagle_config.layer_ids": 1,
    }
    key, value = r.find(*spellings)
    if value is None:
        key = "target_layer_ids"
    is_ints = isinstance(value, (list, tuple)) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in value
    )
    if not is_ints or not value:
        r.problems.append(f"{key} is {value!r}, wanted a list of target layer ids")
        return (0,)
    ids = tuple(i - spellings[key] for i in value)
    if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
        r.problems.append(f"{key} is {list(value)}, wanted strictly increasing ids")
    low = spellings[key]
    for i in value:
        if i < low:
            r.problems.append(f"{key} holds {i}, wanted ids of at least {low}")
        elif target_layers is not None and i - low >= target_layers - 1:
            r.problems.append(
                f"{key} holds {i}, wanted ids below {target_layers - 1 + low}: the "
                f"final of {target_layers} target layers cannot be tapped"
            )
    _, count = r.find("num_target_layers")
    if count is not None and count != len(ids):
        r.problems.append(
            f"num_target_layers is {count!r}, {key} holds {len(ids)} ids: make them "
            "equal"
        )
    return ids


def _rope(r: _Reader, dim: int) -> RopeConfig:
    place = "rope_parameters" if r.raw.get("rope_parameters") else "rope_scaling"
    if not isinstance(r.raw.get(place, {}), Mapping):
        r.problems.append(f"{place} is {r.raw[place]!r}, wanted an object or null")
    kind = r.find(f"{place}.rope_type", f"{place}.type")[1] or "default"
    theta = r.number(f"{place}.rope_theta", "rope_theta", default=DEFAULT_THETA)
    if kind == "default":
        return RopeConfig(dim, theta)
    if kind not in ("yarn", "deepseek_yarn"):
        r.problems.append(f"{place}.rope_type is {kind!r}, wanted 'default' or 'yarn'")
        return RopeConfig(dim, theta)
    mscale = _plain_number(r, f"{place}.mscale")
    yarn = Yarn(
        factor=r.number(f"{place}.factor"),
        original_max_position=r.integer(f"{place}.original_max_position_embeddings"),
        beta_fast=r.number(f"{place}.beta_fast", default=32.0),
        beta_slow=r.number(f"{place}.beta_slow", default=1.0),
        mscale=1.0 if mscale is None else mscale,
        mscale_all_dim=_plain_number(r, f"{place}.mscale_all_dim") or 0.0,
        attention_factor=_plain_number(r, f"{place}.attention_factor"),
    )
    return RopeConfig(dim, theta, yarn)


def _plain_number(r: _Reader, key: str) -> float | None:
    """A number that may be 0, or not given."""
    _, value = r.find(key)
    if value is None:
        return None
    if not _is_number(value) or value < 0:
        r.problems.append(f"{key} is {value!r}, wanted a number of at least 0")
        return None
    return float(value)


def _markov(r: _Reader) -> MarkovConfig | None:
    rank = r.integer("markov_rank", "dflash_config.markov_rank", default=0, least=0)
    kind: Any = r.choice(
        "markov_head_type",
        "dflash_config.markov_head_type",
        options=("vanilla", "gated", "rnn"),
        default="vanilla",
    )
    return MarkovConfig(kind, rank) if rank else None


def _confidence(r: _Reader) -> Literal["none", "hidden", "markov"]:
    enabled, with_markov = (
        r.flag(key, f"dflash_config.{key}", default=False)
        for key in ("enable_confidence_head", "confidence_head_with_markov")
    )
    if not enabled:
        return "none"
    return "markov" if with_markov else "hidden"
