# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What one rank reads in one draft step, by stage, and the time that takes at least.

Bytes are counted from the shapes of the checkpoint's tensors. Every matrix is read
once a step, whatever the number of requests; Markov matrices once a drafted token, or
once a step where they stay in the chip's own cache (`w2_once`). Beside the weights:
cache rows of the context, and logits written and read. Two layouts over P
tensor-parallel ranks:

    stock       context_proj and W2 whole on every rank
    sparkgap    context_proj by its columns, W2 by vocabulary

and in both q_b, kv_b, o, the MLP and lm_head are shared, the A-projections are not.
Vectors, embedding rows and activations (below 0.1 % of a step of Kimi K3) are left out:
what is given is a floor.

`cli/inspect.py` and the benchmarks read it; `tests/test_workloads.py` holds the table
of figures that it must give.
"""

import math
from dataclasses import dataclass

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.sharding import check_shardable
from sparkgap.weights import expected_tensors, optional_tensors

# Measured on an H200: a plain read of 4 GB. Its data sheet says 4.8.
H200_TB_PER_S = 4.5

# Stages by what a tensor's canonical name ends in, with the layouts that share it.
NEITHER, OURS, BOTH = (False, False), (False, True), (True, True)
STAGES: dict[str, tuple[tuple[str, ...], tuple[bool, bool]]] = {
    "context_proj": (("context_proj.weight",), OURS),
    # A second reading of kv_a, by the context rows, all layers in one matrix.
    "context_kv": (("kv_a_proj_with_mqa.weight",), NEITHER),
    "a_projections": (("q_a_proj.weight", "kv_a_proj_with_mqa.weight"), NEITHER),
    "attention": (("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"), BOTH),
    "mlp": (("mlp.gate_proj.weight", "up_proj.weight", "down_proj.weight"), BOTH),
    "lm_head": (("lm_head.weight",), BOTH),
}


@dataclass(frozen=True)
class Step:
    """R requests of `context` cached tokens each; P ranks, of which D share a cache."""

    requests: int = 1
    context: int = 0
    tensor_parallel: int = 1
    context_parallel: int = 1
    element_bytes: int = 2


@dataclass(frozen=True)
class Stage:
    """Bytes that a rank reads (and, of logits, writes) in one stage of a step.

    sparkgap_w2_once: with each Markov matrix counted once, not once a drafted token.
    """

    name: str
    stock: int
    sparkgap: int
    sparkgap_w2_once: int
    is_weight: bool = True


@dataclass(frozen=True)
class Workload:
    """A step by its stages."""

    stages: tuple[Stage, ...]

    def total(self, layout: str, *, weights_only: bool = False) -> int:
        """Bytes in a layout: "stock", "sparkgap" or "sparkgap_w2_once"."""
        counted = [s for s in self.stages if s.is_weight or not weights_only]
        return sum(getattr(stage, layout) for stage in counted)


def parameters(config: DraftConfig) -> int:
    """All of a checkpoint's, its copy of the target's embedding included; d2t is a
    table of ids, and lm_head the target's own."""
    embedding = "embed_tokens.weight"
    shapes = expected_tensors(config)
    shapes |= {embedding: optional_tensors(config)[embedding]}
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "d2t")


def cache_bytes_per_token(config: DraftConfig, element_bytes: int = 2) -> int:
    """All layers' latent rows of one token."""
    return config.num_layers * config.latent_dim * element_bytes


def floor_us(size: int, tb_per_s: float = H200_TB_PER_S) -> float:
    """Microseconds that reading `size` bytes takes at least."""
    return size / (tb_per_s * 1e6)


def workload(config: DraftConfig, step: Step) -> Workload:
    """Raises InputError if the ranks cannot share the draft or the cache."""
    _check(config, step)
    shapes = expected_tensors(config) | optional_tensors(config)

    def read(suffixes: tuple[str, ...], *, shared: bool) -> int:
        found = [s for name, s in shapes.items() if name.endswith(suffixes)]
        ranks = step.tensor_parallel if shared else 1
        return sum(_share(shape, ranks) for shape in found) * step.element_bytes

    stages = []
    for name, (suffixes, (in_stock, in_ours)) in STAGES.items():
        ours = read(suffixes, shared=in_ours)
        stages.append(Stage(name, read(suffixes, shared=in_stock), ours, ours))
    return Workload(
        (*stages, *_markov(config, step), _cache(config, step), _logits(config, step))
    )


def _check(config: DraftConfig, step: Step) -> None:
    problems = [
        f"{name} is {value}, wanted at least {least}"
        for name, value, least in (
            ("the number of requests", step.requests, 1),
            ("the context", step.context, 0),
            ("context parallelism", step.context_parallel, 1),
        )
        if value < least
    ]
    if problems:
        raise InputError("; ".join(problems))
    check_shardable(config, step.tensor_parallel)
    if step.tensor_parallel % step.context_parallel:
        raise InputError(
            f"{step.context_parallel} context-parallel ranks out of "
            f"{step.tensor_parallel} tensor-parallel ones: choose a divisor of "
            f"{step.tensor_parallel}"
        )


def _share(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the largest shard. Vocabularies are padded to a multiple of the
    ranks; of everything else both sides divide, so it does not matter which is cut."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def _markov(config: DraftConfig, step: Step) -> tuple[Stage, ...]:
    """W1's looked-up rows; for each drafted token W2 and a gated or rnn head's map."""
    if config.markov is None:
        return ()
    size, drafts, rank = step.element_bytes, config.num_drafts, config.markov.rank
    rows = step.requests * drafts * rank * size
    w2 = (config.draft_vocab_size, rank)
    whole, shard = (_share(w2, p) * size for p in (1, step.tensor_parallel))
    found = [
        Stage("markov_w1", rows, rows, rows),
        Stage("markov_w2", whole * drafts, shard * drafts, shard),
    ]
    maps = [
        math.prod(shape) * size
        for name, shape in expected_tensors(config).items()
        if name in ("markov_head.gate_proj.weight", "markov_head.joint_proj.weight")
    ]
    found += [Stage("markov_map", n * drafts, n * drafts, n) for n in maps]
    return tuple(found)


def _cache(config: DraftConfig, step: Step) -> Stage:
    """Context rows, each once for all rows of a block, the longest share of D ranks."""
    rows = step.requests * -(-step.context // step.context_parallel)
    size = rows * cache_bytes_per_token(config, step.element_bytes)
    return Stage("cache", size, size, size, is_weight=False)


def _logits(config: DraftConfig, step: Step) -> Stage:
    """Written and read; gathered on every rank in stock engines."""
    rows = step.requests * config.num_drafts
    whole, shard = (
        2 * rows * _share((config.draft_vocab_size,), p) * step.element_bytes
        for p in (1, step.tensor_parallel)
    )
    return Stage("logits", whole, shard, shard, is_weight=False)
