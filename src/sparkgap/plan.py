# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Which implementation runs each op of a step, and why not the others.

`plan_config` is the first phase, the one that a config and a device suffice for. It
asks each implementation, most specialised first, what speaks against it, and takes the
first that nothing speaks against. The choice depends on the specs and the device alone,
so all ranks and all runs choose the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from sparkgap.config import DraftConfig
from sparkgap.device import Device
from sparkgap.errors import InputError
from sparkgap.ops.contract import REFERENCE, Implementation, OpSpec, Reason

# Most specialised first. This version has the definitions only.
IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = dict.fromkeys(
    (
        "embed",
        "norm",
        "add_norm",
        "linear",
        "gated_mlp",
        "context_kv",
        "mla_query",
        "mla_decode",
        "markov_sample",
        "confidence",
    ),
    (REFERENCE,),
)


@dataclass(frozen=True)
class Workload:
    """How a draft will be run: at most `requests` at once, in which dtypes."""

    requests: int = 1
    activation: torch.dtype = torch.bfloat16
    weight: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16
    numerics: Literal["stock", "fp32"] = "stock"


@dataclass(frozen=True)
class Choice:
    """chosen: an implementation's name; rejected: the ones before it, with reasons."""

    spec: OpSpec
    chosen: str
    rejected: tuple[tuple[str, tuple[Reason, ...]], ...]


@dataclass(frozen=True)
class Plan:
    """One choice per use of an op, in the order of the step."""

    device: Device
    choices: tuple[Choice, ...]


def plan_config(
    config: DraftConfig,
    device: Device,
    workload: Workload | None = None,
    implementations: Mapping[str, tuple[Implementation, ...]] = IMPLEMENTATIONS,
) -> Plan:
    """Plan every op of a draft step.

    Raises InputError when an op has no usable implementation; it lists every op and
    every reason at once.
    """
    choices, problems = [], []
    for spec in op_specs(config, workload or Workload()):
        rejected: list[tuple[str, tuple[Reason, ...]]] = []
        for candidate in implementations[spec.op]:
            reasons = tuple(candidate.reasons_against(spec, device))
            if not reasons:
                choices.append(Choice(spec, candidate.name, tuple(rejected)))
                break
            rejected.append((candidate.name, reasons))
        else:
            why = "; ".join(
                f"{name}: {', '.join(reason.text for reason in reasons)}"
                for name, reasons in rejected
            )
            problems.append(f"  {spec.op} ({spec.use}): {why}")
    if problems:
        raise InputError(
            f"{config.name} cannot run on {device.name}:\n"
            + "\n".join(problems)
            + "\nload it in a dtype that is wanted, or on another device"
        )
    return Plan(device, tuple(choices))


def op_specs(config: DraftConfig, workload: Workload) -> list[OpSpec]:
    """Every use of an op in one step, in order. Context rows of a step are at most the
    block's, one more than the drafts: k + 1 tokens come of a round."""
    c = config
    block = workload.requests * c.block_size
    context = workload.requests * (c.num_drafts + 1)
    drafts = workload.requests * c.num_drafts
    d, heads, latent = c.hidden_size, c.num_heads, c.latent_dim
    mla = {"H": heads, "D": latent, "kv_rank": c.kv_lora_rank}
    rank = c.markov.rank if c.markov else 0
    uses: list[tuple[str, str, int, dict[str, int]]] = [
        (
            "linear",
            "context_proj",
            context,
            _sizes(d, c.num_taps * c.target_hidden_size),
        ),
        ("norm", "context", context, {"d": d}),
        ("context_kv", "all layers", context, {"L": c.num_layers, "d": d, "D": latent}),
        ("embed", "block ids", block, {"V": c.vocab_size, "d": d}),
        ("mla_query", "block", block, {"d": d, "q_rank": c.q_lora_rank, **mla}),
        ("mla_decode", "block over context", block, mla),
        ("linear", "attention output", block, _sizes(d, heads * c.v_head_dim)),
        ("add_norm", "residual", block, {"d": d}),
        ("gated_mlp", "block", block, {"d": d, "F": c.intermediate_size}),
        ("linear", "lm_head", drafts, _sizes(c.draft_vocab_size, d)),
        ("markov_sample", "drafts", drafts, {"V": c.draft_vocab_size, "r": rank}),
    ]
    if c.confidence != "none":
        uses.append(("confidence", "drafts", drafts, {"d": d, "r": rank}))
    return [
        OpSpec(
            op,
            use,
            rows,
            sizes,
            workload.activation,
            workload.weight,
            workload.cache if op in ("mla_decode", "context_kv") else None,
            c.causal,
            workload.numerics,
        )
        for op, use, rows, sizes in uses
    ]


def _sizes(rows: int, columns: int) -> dict[str, int]:
    return {"N": rows, "K": columns}
