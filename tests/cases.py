# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Inputs of the op and model tests: random tensors, paged caches full of poison, rope
configurations. Deterministic: every value follows from the case's own seed."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oracle import Array, exact, softmax_mix
from sparkgap.config import RopeConfig, Yarn
from sparkgap.ops.mla_decode import Extent, PagedRows
from sparkgap.verify.tolerance import bound, ulp

FLOATS = (torch.float32, torch.bfloat16)
FP8 = torch.float8_e4m3fn
# A block table's unused entries: negative, past the cache, extremes, the null block.
ABSURD = (-1, -(2**31), 2**31 - 1, 10**6, 0, -7)

ROPES = {
    "plain": RopeConfig(dim=64, theta=50000.0, yarn=None),
    "plain-theta-1e6": RopeConfig(dim=16, theta=1e6, yarn=None),
    "one-pair": RopeConfig(dim=2, theta=1e4, yarn=None),
    "k3": RopeConfig(64, 5e4, Yarn(32.0, 32768, mscale=1.0, mscale_all_dim=1.0)),
    # A bare YaRN x32 multiplies the table by 0.1 ln 32 + 1 = 1.347.
    "bare": RopeConfig(64, 5e4, Yarn(32.0, 32768)),
    "mscales": RopeConfig(32, 1e4, Yarn(16.0, 4096, 24.0, 2.0, 0.7, 1.3)),
    "factor-1": RopeConfig(16, 1e4, Yarn(1.0, 2048, mscale=2.0, mscale_all_dim=0.5)),
    "llama-scaling": RopeConfig(16, 1e4, Yarn(8.0, 64, attention_factor=1.0)),
    # Both ends of the ramp at pair 0: its width would be zero.
    "ramp-0": RopeConfig(16, 1e4, Yarn(4.0, 6, mscale=1.0, mscale_all_dim=1.0)),
    # The ramp would end at 8 of 8 dimensions and is cut at 7: it is steeper for it.
    "ramp-cut": RopeConfig(8, 10.0, Yarn(4.0, 477, mscale=1.0, mscale_all_dim=1.0)),
    # It starts at 14 and is cut at 7: its width is -7, and every pair is stretched.
    "ramp-crossed": RopeConfig(8, 10.0, Yarn(4.0, 10**6, 32.0, 1.0, 1.0, 1.0)),
    # Not a power of two: stretched frequencies are rounded.
    "factor-10": RopeConfig(64, 5e4, Yarn(10.0, 32768, mscale=1.0, mscale_all_dim=1.0)),
}


def name(value: object) -> str:
    """A pytest id: dtypes without their module."""
    return str(value).removeprefix("torch.")


def rand(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> Tensor:
    """Normal values times `size`, already rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * size).to(dtype)


def largest(*values: Array) -> float:
    return max((float(np.abs(v).max()) for v in values if np.size(v)), default=0.0)


@dataclass(frozen=True)
class Paged:
    """Requests over a paged cache. lens: context rows of each of the R requests; block:
    how many of the q rows each has; share: consecutive requests on one table row, whose
    rows they all read."""

    lens: tuple[int, ...]
    block: tuple[int, ...]
    q: int = 3
    heads: int = 2
    kv_rank: int = 8
    rope: int = 4
    size: int = 4  # rows of a cache block
    share: int = 1
    causal: bool = False
    inside: bool = False  # the block's rows lie in the cache
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    kv_scale: float = 1.0
    scale: float = 0.3
    spread: float = 1.0  # size of the queries
    ids: torch.dtype = torch.int32
    seed: int = 0


@dataclass
class Filled:
    """A `Paged` case as tensors, with what every request should see."""

    case: Paged
    query: Tensor
    rows: PagedRows
    extent: Extent
    block_kv: Tensor | None
    context: list[Array] = field(default_factory=list)  # R x [lens, D] float64
    own: list[Array] = field(default_factory=list)  # R x [block_lens, D] float64

    def expected(self) -> tuple[Array, Array]:
        """out [R, q, H, kv_rank], lse [R, q, H]."""
        p, query = self.case, exact(self.query)
        out = np.zeros((len(p.lens), p.q, p.heads, p.kv_rank))
        lse = np.zeros(out.shape[:3])
        for r, t, h in np.ndindex(*lse.shape):
            own = self.own[r][: t + 1] if p.causal else self.own[r]
            keys = np.concatenate([self.context[r], own])
            scores = np.array([p.scale * float(query[r, t, h] @ key) for key in keys])
            out[r, t, h], lse[r, t, h] = softmax_mix(scores, keys[:, : p.kv_rank])
        return out, lse

    def limits(self) -> tuple[float, float]:
        """Bounds of out and lse. A score errs by its dot product's bound; a weight of
        the mixture by e^that, so the output by twice that times the largest value."""
        p, seen = self.case, [*self.context, *self.own]
        count = max(
            (len(c) + len(o) for c, o in zip(self.context, self.own, strict=True)),
            default=1,
        )
        key, value = largest(*seen), largest(*(s[:, : p.kv_rank] for s in seen))
        width = p.kv_rank + p.rope
        query = largest(exact(self.query))
        score = p.scale * query * key * math.sqrt(width) * 3
        off = bound(torch.float32, score, width)
        lse = off + bound(torch.float32, max(score, math.log(max(count, 2))), count)
        return 2 * off * value + bound(p.dtype, value, count), lse


def fill(p: Paged) -> Filled:
    """Lay the case out: used blocks in random places, NaN everywhere else."""
    rng = np.random.default_rng(p.seed)
    requests, width = len(p.lens), p.kv_rank + p.rope
    tables = requests // p.share if requests else 0
    extra = p.q if p.inside else 0
    need = [
        max(p.lens[g * p.share : (g + 1) * p.share], default=0) + extra
        for g in range(tables)
    ]
    columns = max((-(-n // p.size) for n in need), default=0) + 1
    blocks = 1 + sum(-(-n // p.size) for n in need) + 3
    free = list(1 + rng.permutation(blocks - 1))
    table = torch.tensor(
        rng.choice(ABSURD, size=(tables, columns)).tolist(), dtype=p.ids
    ).view(tables, columns)
    cache = torch.full((blocks, p.size, width), math.nan).to(p.cache)
    logical = []
    for g, rows in enumerate(need):
        values = torch.from_numpy(rng.normal(size=(rows, width))).float()
        stored = (values / p.kv_scale).to(p.cache)
        for i in range(-(-rows // p.size)):
            table[g, i] = block = int(free.pop())
            part = stored[i * p.size : (i + 1) * p.size]
            _write(cache, block, part)
        logical.append(exact(stored) * p.kv_scale)
    beside = torch.from_numpy(rng.normal(size=(requests, p.q, width))).to(p.dtype)
    own = []
    for r in range(requests):
        start, end = p.lens[r], p.lens[r] + p.block[r]
        inside = logical[r // p.share][start:end] if p.inside else None
        own.append(inside if p.inside else exact(beside[r, : p.block[r]]))
        beside[r, p.block[r] :] = math.nan
    query = torch.from_numpy(rng.normal(size=(requests, p.q, p.heads, width)))
    lens = torch.tensor(p.lens, dtype=p.ids)
    return Filled(
        p,
        (query * p.spread).to(p.dtype),
        PagedRows(cache, table, p.kv_scale),
        Extent(lens, torch.tensor(p.block, dtype=p.ids), p.causal),
        None if p.inside else beside,
        [logical[r // p.share][: p.lens[r]] for r in range(requests)],
        own,
    )


def _write(cache: Tensor, block: int, part: Tensor) -> None:
    if cache.dtype == FP8:
        cache.view(torch.uint8)[block, : len(part)] = part.view(torch.uint8)
    else:
        cache[block, : len(part)] = part


def table_error(rope: RopeConfig, position: int, frequency: float) -> float:
    """How far an fp32 cosine may be from the exact one: the frequency errs by 3 ulp
    (power, division, ramp), the angle by a fourth, and an angle's error is the value's.
    """
    angle = position * frequency
    size = 1.0 if rope.yarn is None else max(1.0, 0.1 * math.log(rope.yarn.factor) + 1)
    return size * (4 * ulp(torch.float32, max(angle, 1.0)) + 2 * 2.0**-24)
