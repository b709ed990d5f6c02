# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The ops of one draft step, and the sets of them that the model can be run with.

`model.py` calls an `OpSet` and nothing else. `REFERENCE` holds the definitions: plain
torch, any device, differentiable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkgap.ops.confidence import confidence
from sparkgap.ops.context_kv import context_kv
from sparkgap.ops.embed import embed
from sparkgap.ops.gated_mlp import gated_mlp
from sparkgap.ops.linear import linear
from sparkgap.ops.markov_sample import markov_sample
from sparkgap.ops.mla_decode import mla_decode
from sparkgap.ops.mla_query import mla_query
from sparkgap.ops.norm import add_norm, norm


@dataclass(frozen=True)
class OpSet:
    """One implementation per op; signatures are those of the definitions."""

    embed: Callable[..., Any]
    norm: Callable[..., Any]
    add_norm: Callable[..., Any]
    linear: Callable[..., Any]
    gated_mlp: Callable[..., Any]
    context_kv: Callable[..., Any]
    mla_query: Callable[..., Any]
    mla_decode: Callable[..., Any]
    markov_sample: Callable[..., Any]
    confidence: Callable[..., Any]


REFERENCE = OpSet(
    embed=embed,
    norm=norm,
    add_norm=add_norm,
    linear=linear,
    gated_mlp=gated_mlp,
    context_kv=context_kv,
    mla_query=mla_query,
    mla_decode=mla_decode,
    markov_sample=markov_sample,
    confidence=confidence,
)
