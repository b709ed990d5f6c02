# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The paged latent cache of the draft layers, and which request owns which block.

Per layer one tensor [blocks, block_size, kv_rank + rope]: normed latent | rotated tail,
in fp32, bf16 or fp8 (row / kv_scale). Slot s is row s % block_size of block
s // block_size. Slot -1 writes nothing; block 0 is never handed out, so that a padded
block-table entry can name it. Only context rows are stored: `store` is the one writer,
`mla_decode` the one reader.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparkgap.errors import InputError

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentCache:
    """layers: L × [blocks, block_size, D]; kv_scales: L floats, 1.0 unless fp8."""

    layers: tuple[Tensor, ...]
    kv_scales: tuple[float, ...]

    @property
    def block_size(self) -> int:
        return self.layers[0].shape[1]

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    def store(self, latents: Tensor, slots: Tensor) -> None:
        """Write latents [L, C, D] to slots [C]; rows with slot -1 are dropped.

        Raises InputError, before anything is written, for a slot outside the cache and
        for an fp8 cache whose scale would overflow (|row / kv_scale| > 448 would be NaN
        or clipped; a scale of 1 cost others a third of their accepted length).
        """
        if slots.numel() == 0:
            return
        rows = self.num_blocks * self.block_size
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= rows:
            raise InputError(
                f"slot {low if low < -1 else high} is outside the cache; "
                f"slots are -1 (write nothing) or 0 to {rows - 1}"
            )
        keep = slots >= 0
        latents, slots = latents[:, keep], slots[keep]
        scaled = [self._scaled(i, rows) for i, rows in enumerate(latents)]
        for layer, values in zip(self.layers, scaled, strict=True):
            # fp8 tensors have no index_put on CPU; their bytes do.
            flat = layer.flatten(0, 1)
            if layer.dtype == FP8:
                flat.view(torch.uint8)[slots] = values.to(FP8).view(torch.uint8)
            else:
                flat[slots] = values.to(layer.dtype)

    def _scaled(self, index: int, rows: Tensor) -> Tensor:
        if self.layers[index].dtype != FP8:
            return rows
        values = rows.float() / self.kv_scales[index]
        limit = torch.finfo(FP8).max
        largest = float(values.abs().amax()) if values.numel() else 0.0
        if not largest <= limit:
            raise InputError(
                f"draft layer {index}: the largest latent over kv_scale is "
                f"{largest:.1f}, fp8 holds {limit:.0f}; use a kv_scale of at least "
                f"{largest * self.kv_scales[index] / limit:.4g} or a bf16 cache"
            )
        return values


@dataclass
class _Request:
    """start: position of the first context row; length: context rows so far."""

    start: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockTables:
    """Hands out blocks of a cache to requests, and takes them back.

    A request's row i holds position start + i, where start is the first position it was
    given: context may start late (a prefix whose taps nobody has), and what is missing
    is not attended.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._requests: dict[Hashable, _Request] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def extend(self, request: Hashable, first: int, count: int) -> list[int]:
        """Slots of positions first … first + count - 1, which become the last ones.

        Positions may repeat or go back (rows are written anew), not skip ahead.
        Raises InputError, with nothing changed, when they do or no block is free.
        """
        state = self._requests.get(request) or _Request(start=first)
        row = first - state.start
        if not 0 <= row <= state.length:
            raise InputError(
                f"request {request!r}: context position {first} leaves a gap; it holds "
                f"positions {state.start} to {state.start + state.length - 1}, so the "
                f"next must be at most {state.start + state.length}"
            )
        need = -(-(row + count) // self.block_size) - len(state.blocks)
        if need > len(self._free):
            raise InputError(
                f"request {request!r} needs {need} more cache blocks of "
                f"{self.block_size} rows, {len(self._free)} are free; release finished "
                "requests or build the drafter with more max_requests"
            )
        state.blocks += [self._free.pop() for _ in range(need)]
        state.length = row + count
        self._requests[request] = state
        size = self.block_size
        return [
            state.blocks[i // size] * size + i % size for i in range(row, row + count)
        ]

    def context_len(self, request: Hashable, position: int) -> int:
        """Context rows of a request whose anchor stands at `position`."""
        state = self._requests.get(request)
        if state is None:
            if position == 0:
                return 0
            raise InputError(
                f"request {request!r} has no context, its anchor stands at {position}; "
                "add the context rows before it with add_context"
            )
        rows = position - state.start
        if not 0 <= rows <= state.length:
            raise InputError(
                f"request {request!r}: its anchor stands at {position} but its context "
                f"covers positions {state.start} to {state.start + state.length - 1}; "
                "add the rows in between with add_context"
            )
        return rows

    def table(self, requests: Sequence[Hashable]) -> Tensor:
        """Block ids [R, n] int32, padded with the null block 0."""
        blocks = [
            self._requests[r].blocks if r in self._requests else [] for r in requests
        ]
        width = max((len(b) for b in blocks), default=0)
        return torch.tensor(
            [b + [0] * (width - len(b)) for b in blocks], dtype=torch.int32
        ).view(len(blocks), width)

    def release(self, request: Hashable) -> None:
        """Give a request's blocks back; an unknown request holds none."""
        state = self._requests.pop(request, None)
        if state is not None:
            self._free += reversed(state.blocks)
