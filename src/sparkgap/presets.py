# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Known drafts, by name: config and source, for sizes and floors without a
checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """config: as in a checkpoint's config.json; source: where its facts are from."""

    source: str
    config: Mapping[str, Any]


_K3: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "block_size": 7,
    "sample_from_anchor": True,
    "is_causal": False,
    "mask_token_id": 163837,
    "markov_rank": 256,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

PRESETS: Mapping[str, Preset] = {
    "kimi-k3": Preset("huggingface.co/Inferact/Kimi-K3-DSpark, revision cf6b824", _K3),
    # Tap ids, mask id and rope details are not published; the sizes do not depend on
    # them, so K3's stand in.
    "kimi-k3.1": Preset(
        "huggingface.co/Inferact/Kimi-K3.1-Pro-DSpark-preview (96 heads, rank 512, "
        "causal block); tap and mask ids assumed as K3's",
        _K3 | {"num_attention_heads": 96, "markov_rank": 512, "is_causal": True},
    ),
    # Its Markov rank and tap ids are not published: 256 and three of K3's are assumed.
    "kimi-k3-block5": Preset(
        "huggingface.co/Inferact/Kimi-K3-DSpark-Block5 (3 layers, 3 taps, causal "
        "block of 5); rank 256 and tap ids assumed",
        _K3
        | {
            "num_hidden_layers": 3,
            "target_layer_ids": [2, 47, 89],
            "block_size": 5,
            "is_causal": True,
        },
    ),
    "smollm2-135m": Preset(
        "shipped with Sparkgap in sparkgap-demo, trained for SmolLM2-135M-Instruct",
        _K3
        | {
            "hidden_size": 576,
            "intermediate_size": 1280,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "q_lora_rank": 256,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "target_num_hidden_layers": 30,
            "target_layer_ids": [2, 8, 15, 22, 28],
            "mask_token_id": 16,
            "markov_rank": 32,
        },
    ),
}
