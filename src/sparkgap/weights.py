# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""DraftWeights: the tensors of a draft, under the names of the published K3 file.

The dataclasses are views over whatever holds the parameters, row-major [N, K].
`checkpoint.py` reads them from folders and writes them; `sharding.py` cuts them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkgap.config import DraftConfig


@dataclass(frozen=True)
class LayerWeights:
    """One draft layer. gate_up holds gate's rows first; kv_b per head nope, then v."""

    input_norm: Tensor  # [d]
    q_a: Tensor  # [q_rank, d]
    q_a_norm: Tensor  # [q_rank]
    q_b: Tensor  # [H * (nope + rope), q_rank]
    kv_a: Tensor  # [kv_rank + rope, d]
    kv_a_norm: Tensor  # [kv_rank]
    kv_b: Tensor  # [H * (nope + v), kv_rank]
    o: Tensor  # [d, H * v]
    post_norm: Tensor  # [d]
    gate_up: Tensor  # [2F, d]
    down: Tensor  # [d, F]

    def w_uk(self, config: DraftConfig) -> Tensor:
        """[H, nope, kv_rank]: latent → keys, a view of kv_b."""
        return self._heads(config)[:, : config.qk_nope_head_dim]

    def w_uv(self, config: DraftConfig) -> Tensor:
        """[H, v, kv_rank]: latent → values, a view of kv_b."""
        return self._heads(config)[:, config.qk_nope_head_dim :]

    def _heads(self, config: DraftConfig) -> Tensor:
        width = config.qk_nope_head_dim + config.v_head_dim
        return self.kv_b.view(-1, width, config.kv_lora_rank)


@dataclass(frozen=True)
class MarkovWeights:
    """w1 [V, r], w2 [Vd, r]; gate_* of a gated head [r, d + r], [r]; joint_* of an rnn
    head [3r, 2r + d], [3r]."""

    w1: Tensor
    w2: Tensor
    gate_w: Tensor | None = None
    gate_b: Tensor | None = None
    joint_w: Tensor | None = None
    joint_b: Tensor | None = None


@dataclass(frozen=True)
class ConfidenceWeights:
    """weight [1, d (+ r)], bias [1]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class DraftWeights:
    """All tensors of a draft. embedding [V, d] and lm_head [Vd, d] belong to the target
    and may be None; d2t [Vd] int64 is the offset table of a reduced vocabulary."""

    context_proj: Tensor  # [d, m * d_t]
    context_norm: Tensor  # [d]
    fc_norms: tuple[Tensor, ...]  # m × [d_t], or empty
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [d]
    markov: MarkovWeights | None = None
    confidence: ConfidenceWeights | None = None
    embedding: Tensor | None = None
    lm_head: Tensor | None = None
    d2t: Tensor | None = None


Shapes = dict[str, tuple[int, ...]]


def layer_tensors(c: DraftConfig) -> Shapes:
    """Canonical names within `layers.<i>.` and their shapes."""
    d, attn = c.hidden_size, "self_attn."
    return {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        f"{attn}q_a_proj.weight": (c.q_lora_rank, d),
        f"{attn}q_a_layernorm.weight": (c.q_lora_rank,),
        f"{attn}q_b_proj.weight": (c.num_heads * c.qk_head_dim, c.q_lora_rank),
        f"{attn}kv_a_proj_with_mqa.weight": (c.latent_dim, d),
        f"{attn}kv_a_layernorm.weight": (c.kv_lora_rank,),
        f"{attn}kv_b_proj.weight": (
            c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
            c.kv_lora_rank,
        ),
        f"{attn}o_proj.weight": (d, c.num_heads * c.v_head_dim),
        "mlp.gate_proj.weight": (c.intermediate_size, d),
        "mlp.up_proj.weight": (c.intermediate_size, d),
        "mlp.down_proj.weight": (d, c.intermediate_size),
    }


def expected_tensors(c: DraftConfig) -> Shapes:
    """Canonical names and shapes that a checkpoint must hold."""
    d = c.hidden_size
    shapes: Shapes = {
        "context_proj.weight": (d, c.num_taps * c.target_hidden_size),
        "context_norm.weight": (d,),
        "final_norm.weight": (d,),
    }
    if c.fc_norm:
        taps = range(c.num_taps)
        shapes |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in taps}
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": s for name, s in layer_tensors(c).items()}
    if c.markov is not None:
        shapes |= _markov_tensors(c, c.markov.rank, c.markov.kind)
    if c.confidence != "none":
        rank = c.markov.rank if c.markov and c.confidence == "markov" else 0
        shapes["confidence_head.proj.weight"] = (1, d + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    if c.draft_vocab_size != c.vocab_size:
        shapes["d2t"] = (c.draft_vocab_size,)
    return shapes


def _markov_tensors(c: DraftConfig, r: int, kind: str) -> Shapes:
    head, d = "markov_head.", c.hidden_size
    shapes: Shapes = {
        f"{head}markov_w1.weight": (c.vocab_size, r),
        f"{head}markov_w2.weight": (c.draft_vocab_size, r),
    }
    if kind == "gated":
        shapes |= {f"{head}gate_proj.weight": (r, d + r), f"{head}gate_proj.bias": (r,)}
    if kind == "rnn":
        shapes[f"{head}joint_proj.weight"] = (3 * r, 2 * r + d)
        shapes[f"{head}joint_proj.bias"] = (3 * r,)
    return shapes


def optional_tensors(c: DraftConfig) -> Shapes:
    """Tensors of the target that a checkpoint may hold a copy of."""
    return {
        "embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
    }


def assemble(tensors: Mapping[str, Tensor], config: DraftConfig) -> DraftWeights:
    """Canonical tensors → DraftWeights; gate and up are joined."""
    taps = range(config.num_taps if config.fc_norm else 0)
    get = tensors.get
    markov = confidence = None
    if config.markov is not None:
        head = "markov_head."
        markov = MarkovWeights(
            tensors[f"{head}markov_w1.weight"],
            tensors[f"{head}markov_w2.weight"],
            get(f"{head}gate_proj.weight"),
            get(f"{head}gate_proj.bias"),
            get(f"{head}joint_proj.weight"),
            get(f"{head}joint_proj.bias"),
        )
    if config.confidence != "none":
        proj = "confidence_head.proj."
        confidence = ConfidenceWeights(tensors[f"{proj}weight"], tensors[f"{proj}bias"])
    d2t = get("d2t")
    return DraftWeights(
        context_proj=tensors["context_proj.weight"],
        context_norm=tensors["context_norm.weight"],
        fc_norms=tuple(tensors[f"fc_norm.{i}.weight"] for i in taps),
        layers=tuple(_layer(tensors, f"layers.{i}.") for i in range(config.num_layers)),
        final_norm=tensors["final_norm.weight"],
        markov=markov,
        confidence=confidence,
        embedding=get("embed_tokens.weight"),
        lm_head=get("lm_head.weight"),
        d2t=None if d2t is None else d2t.long(),
    )


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    attn = f"{prefix}self_attn."
    gate, up = tensors[f"{prefix}mlp.gate_proj.weight"], f"{prefix}mlp.up_proj.weight"
    return LayerWeights(
        input_norm=tensors[f"{prefix}input_layernorm.weight"],
        q_a=tensors[f"{attn}q_a_proj.weight"],
        q_a_norm=tensors[f"{attn}q_a_layernorm.weight"],
        q_b=tensors[f"{attn}q_b_proj.weight"],
        kv_a=tensors[f"{attn}kv_a_proj_with_mqa.weight"],
        kv_a_norm=tensors[f"{attn}kv_a_layernorm.weight"],
        kv_b=tensors[f"{attn}kv_b_proj.weight"],
        o=tensors[f"{attn}o_proj.weight"],
        post_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=torch.cat([gate, tensors[up]]),
        down=tensors[f"{prefix}mlp.down_proj.weight"],
    )


def canonical_tensors(weights: DraftWeights) -> dict[str, Tensor]:
    """DraftWeights → canonical names, gate and up apart: the inverse of `assemble`."""
    named: dict[str, Tensor | None] = {
        "context_proj.weight": weights.context_proj,
        "context_norm.weight": weights.context_norm,
        "final_norm.weight": weights.final_norm,
        "embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.lm_head,
        "d2t": weights.d2t,
    }
    named |= {f"fc_norm.{i}.weight": n for i, n in enumerate(weights.fc_norms)}
    for i, layer in enumerate(weights.layers):
        attn, prefix = f"layers.{i}.self_attn.", f"layers.{i}."
        gate, up = layer.gate_up.chunk(2)
        named |= {
            f"{prefix}input_layernorm.weight": layer.input_norm,
            f"{prefix}post_attention_layernorm.weight": layer.post_norm,
            f"{attn}q_a_proj.weight": layer.q_a,
            f"{attn}q_a_layernorm.weight": layer.q_a_norm,
            f"{attn}q_b_proj.weight": layer.q_b,
            f"{attn}kv_a_proj_with_mqa.weight": layer.kv_a,
            f"{attn}kv_a_layernorm.weight": layer.kv_a_norm,
            f"{attn}kv_b_proj.weight": layer.kv_b,
            f"{attn}o_proj.weight": layer.o,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layer.down,
        }
    if weights.markov is not None:
        head, m = "markov_head.", weights.markov
        named |= {
            f"{head}markov_w1.weight": m.w1,
            f"{head}markov_w2.weight": m.w2,
            f"{head}gate_proj.weight": m.gate_w,
            f"{head}gate_proj.bias": m.gate_b,
            f"{head}joint_proj.weight": m.joint_w,
            f"{head}joint_proj.bias": m.joint_b,
        }
    if weights.confidence is not None:
        named["confidence_head.proj.weight"] = weights.confidence.weight
        named["confidence_head.proj.bias"] = weights.confidence.bias
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def random_weights(
    config: DraftConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> DraftWeights:
    """Weights drawn anew for tests, benchmarks and training: matrices of variance
    1 / inputs, norms near 1, embedding and lm_head included; d2t spreads the draft
    vocabulary over the target's."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in (expected_tensors(config) | optional_tensors(config)).items():
        values = torch.randn(shape, generator=draw)
        if name == "d2t":
            stride = config.vocab_size // config.draft_vocab_size
            tensors[name] = torch.arange(config.draft_vocab_size) * (stride - 1)
            continue
        if name.endswith("norm.weight") or name.startswith("fc_norm."):
            values = 1.0 + 0.1 * values
        elif len(shape) == 2:
            # Tables hold rows to look up, not inputs to sum over: unit rows.
            table = name.startswith(("embed_tokens", "markov_head.markov_w1"))
            values = values if table else values / math.sqrt(shape[1])
        else:
            values = 0.1 * values
        tensors[name] = values.to(dtype)
    return assemble({n: t.to(device) for n, t in tensors.items()}, config)
