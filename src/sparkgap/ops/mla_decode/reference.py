# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Definition of mla_decode.

All q * H query rows of a request read one latent row set: the row [kv_rank + rope] is
the key of every head, its first kv_rank columns the value. Block rows either lie in the
cache behind the context (vLLM) or are given beside it (engine-free, training: nothing
is stored, and many anchors of one sequence can share its context).

Rows outside a request's extent, unused block ids and the null block may hold anything,
NaN included: they are zeroed before they meet a weight, for 0 * NaN is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedRows:
    """One layer's cache [blocks, block_size, D] and who owns which block.

    block_table [G, n] int: request i reads row i * G // R of it, so that consecutive
    requests may share a context (G = R when they do not). An fp8 cache holds
    row / kv_scale.
    """

    cache: Tensor
    block_table: Tensor
    kv_scale: float = 1.0


@dataclass(frozen=True)
class Extent:
    """What each request sees: context_lens [R] context rows, block_lens [R] ≤ q rows of
    its own block (fewer than q at the model length, 0 for an empty request); with
    `causal`, block row t sees block rows 0..t only."""

    context_lens: Tensor
    block_lens: Tensor
    causal: bool = False

    def visible_block(self, rows: int) -> Tensor:
        """Mask [R, rows, rows]: block row t (middle) sees block row j (last)."""
        index = torch.arange(rows, device=self.block_lens.device)
        seen = (index < self.block_lens[:, None])[:, None, :].expand(-1, rows, -1)
        return seen & (index <= index[:, None]) if self.causal else seen


def mla_decode(
    q: Tensor,
    rows: PagedRows,
    extent: Extent,
    scale: float,
    kv_rank: int,
    block_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [R, q, H, D] → out [R, q, H, kv_rank] like q, lse [R, q, H] fp32 (natural log).

    block_kv [R, q, D]: the block's own rows; None: row j lies in the cache at
    context_lens + j. A row that sees nothing gives out 0 and lse -inf.
    """
    requests, block, heads, _ = q.shape
    if requests == 0:
        return q[..., :kv_rank], q.new_zeros(q.shape[:-1], dtype=torch.float32)
    in_block = extent.visible_block(block)
    # [R, q]: cache rows that block row t sees, a prefix of its request's rows.
    seen = extent.context_lens[:, None].expand(-1, block)
    if block_kv is None:
        seen = seen + in_block.sum(-1)
    context = _gather(rows, seen.amax(-1))
    groups, length, _ = context.shape
    wide = q.float() * scale
    tiles = requests // groups * block * heads
    scores = torch.einsum("gnd,gcd->gnc", wide.reshape(groups, tiles, -1), context)
    scores = scores.view(requests, block, heads, length)
    hidden = torch.arange(length, device=q.device) >= seen[:, :, None]
    scores = scores.masked_fill(hidden[:, :, None], -torch.inf)
    if block_kv is not None:
        # Rows past the model length are as undefined as any other padding.
        live = in_block.any(1)[..., None]
        own = torch.where(live, block_kv.float(), 0.0)
        within = torch.einsum("rthd,rjd->rthj", wide, own)
        within = within.masked_fill(~in_block[:, :, None], -torch.inf)
        scores = torch.cat([scores, within], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    # The finite stand-in keeps exp(-inf - -inf) out of rows that see nothing.
    weights = (scores - lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp()
    out = torch.einsum(
        "gnc,gcv->gnv",
        weights[..., :length].reshape(groups, tiles, length),
        _finite(context[..., :kv_rank]),
    ).view(requests, block, heads, kv_rank)
    if block_kv is not None:
        out = out + torch.einsum(
            "rthj,rjv->rthv", weights[..., length:], _finite(own[..., :kv_rank])
        )
    return out.to(q.dtype), lse


def _finite(values: Tensor) -> Tensor:
    """Values as the rows that do not see them need them: 0 * NaN and 0 * inf are NaN.

    A row that does see a NaN or an infinity has it in its score, lse and weights.
    """
    return torch.where(values.isfinite(), values, 0.0)


def _gather(rows: PagedRows, seen: Tensor) -> Tensor:
    """Cache rows [G, c, D] fp32 of each block-table row, 0 beyond what anyone sees.

    seen [R]: cache rows the request reads; c is their maximum.
    """
    groups = rows.block_table.shape[0]
    seen = seen.view(groups, -1).amax(-1)
    length = int(seen.max())
    size = rows.cache.shape[1]
    index = torch.arange(length, device=seen.device)
    live = index < seen[:, None]
    blocks = rows.block_table[:, : -(-length // size)].long()
    slots = blocks.repeat_interleave(size, 1)[:, :length] * size + index % size
    # An unused entry of the table may be any number: read block 0 and drop it.
    slots = torch.where(live, slots, 0)
    found = rows.cache.flatten(0, 1)[slots].float()
    if rows.kv_scale != 1.0:
        found = found * rows.kv_scale
    return torch.where(live[..., None], found, 0.0)
