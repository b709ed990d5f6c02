# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""DraftConfig: geometry and rules of a DSpark draft.

It is read from a checkpoint's config.json in any spelling seen in the wild
(`config_reader.py`), from a preset (`presets.py`), or built by hand; everything below
takes its sizes from here. The K3 family is served: MLA, any head count, causal or
non-causal block, both block layouts, every Markov and confidence head.

`target_layer_ids` are 0-based: id i is the output of target layer i, residual stream
included. `block_size` counts block rows, the anchor's included, whatever the layout.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkgap.errors import InputError

# How a K3 draft names itself in config.json.
ARCHITECTURE, MODEL_TYPE = "K3DSparkModel", "k3_dspark"


class ConfigError(InputError):
    """A draft's config cannot be served; the message lists every problem."""

    def __init__(self, name: str, problems: list[str]) -> None:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"cannot serve the draft {name}:{lines}")
        self.problems = tuple(problems)


def _magnitude(factor: float, mscale: float) -> float:
    """YaRN's m: how much longer a stretched context makes queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary frequencies, in the form DeepSeek and vLLM compute it.

    Without mscale_all_dim (0) only the table is scaled; attention_factor 1 switches the
    softmax correction off (vLLM 0.33.0, models/kimi_k3/nvidia/mla.py).
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    @property
    def table_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        over = _magnitude(self.factor, self.mscale_all_dim)
        return _magnitude(self.factor, self.mscale) / over

    @property
    def softmax_correction(self) -> float:
        """What the softmax scale is multiplied by."""
        if self.attention_factor == 1:
            return 1.0
        return _magnitude(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` dimensions, plain or YaRN-scaled."""

    dim: int
    theta: float
    yarn: Yarn | None = None

    @property
    def table_scale(self) -> float:
        return 1.0 if self.yarn is None else self.yarn.table_scale


@dataclass(frozen=True)
class MarkovConfig:
    """The head that makes a token depend on the one before it, of rank r."""

    kind: Literal["vanilla", "gated", "rnn"]
    rank: int


@dataclass(frozen=True)
class DraftConfig:
    """See the module's docstring; `markov` None: no head. confidence: "none", from
    "hidden" alone, or from hidden and the previous token's "markov" embedding."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    target_hidden_size: int
    target_num_layers: int | None
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    causal: bool
    sample_from_anchor: bool
    fc_norm: bool
    aux_hidden_stream: str | None
    markov: MarkovConfig | None
    confidence: Literal["none", "hidden", "markov"]

    @property
    def num_taps(self) -> int:
        """m, the target layers whose outputs are read."""
        return len(self.target_layer_ids)

    @property
    def num_drafts(self) -> int:
        """k: every row drafts anchor-first; fill-in leaves the anchor's row unused."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cache row: normed latent and rotated tail."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        scale: float = self.qk_head_dim**-0.5
        return (
            scale
            if self.rope.yarn is None
            else scale * self.rope.yarn.softmax_correction
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, name: str) -> "DraftConfig":
        """Read a config.json's content. Raises ConfigError with every problem."""
        from sparkgap.config_reader import read_config

        return read_config(raw, name)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "DraftConfig":
        """Read a checkpoint folder's config.json; InputError if there is none."""
        folder = Path(path)
        file = folder / "config.json"
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; give a checkpoint's folder")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"{folder} holds no config.json; give a folder with config.json and "
                "safetensors"
            ) from None
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}; make it a readable file"
            ) from None
        except (ValueError, RecursionError) as error:
            # Bad UTF-8, numbers of over 4300 digits and deep nesting included.
            raise InputError(
                f"{file} is not valid JSON: {error}; copy it anew"
            ) from None
        if not isinstance(raw, dict):
            raise InputError(f"{file} holds a {type(raw).__name__}, wanted an object")
        return cls.from_dict(raw, name=folder.resolve().name)

    @classmethod
    def preset(cls, name: str) -> "DraftConfig":
        """A known draft's config, without its weights."""
        from sparkgap.presets import PRESETS

        if name not in PRESETS:
            raise InputError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls.from_dict(PRESETS[name].config, name=name)

    def to_dict(self) -> dict[str, Any]:
        """A config.json that vLLM's K3DSparkConfig and `from_dict` read."""
        return _written(self)


def _written(c: DraftConfig) -> dict[str, Any]:
    """See `DraftConfig.to_dict`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope.theta}
    if c.rope.yarn is not None:
        y = c.rope.yarn
        rope |= {
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_max_position,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "mscale": y.mscale,
            "mscale_all_dim": y.mscale_all_dim,
        }
        if y.attention_factor is not None:
            rope["attention_factor"] = y.attention_factor
    written = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": rope,
        "target_hidden_size": c.target_hidden_size,
        "target_num_hidden_layers": c.target_num_layers,
        "num_target_layers": c.num_taps,
        "target_layer_ids": list(c.target_layer_ids),
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "is_causal": c.causal,
        "sample_from_anchor": c.sample_from_anchor,
        "fc_norm": c.fc_norm,
        "aux_hidden_stream": c.aux_hidden_stream,
        "markov_rank": c.markov.rank if c.markov else 0,
        "markov_head_type": c.markov.kind if c.markov else None,
        "enable_confidence_head": c.confidence != "none",
        "confidence_head_with_markov": c.confidence == "markov",
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in written.items() if value is not None}
