# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A target's KV cache that can be cut back to any length at no cost.

Per layer two buffers [B, Hkv, S, D], written in place and grown by doubling; what a
model attends is a view of their first rows. transformers' own DynamicCache copies the
whole cache at every token (1 ms of 31 for 200 rows of a 135 M model on two cores) and
before 5.24 crops by another convention.

Invariant: rows behind `rows` are garbage and never attended.
"""

import functools
from typing import Any

from torch import Tensor

FIRST_ROWS = 256


@functools.cache
def _layer_class() -> type:
    """The layer, made at first use: transformers is imported lazily."""
    from transformers.cache_utils import CacheLayerMixin

    class PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False
        is_croppable = True

        def __init__(self) -> None:
            super().__init__()
            self.rows = 0

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.keys = _buffer(key_states, FIRST_ROWS)
            self.values = _buffer(value_states, FIRST_ROWS)
            self.is_initialized = True

        def update(
            self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            end = self.rows + key_states.shape[2]
            self.keys = _with_room(self.keys, self.rows, end)
            self.values = _with_room(self.values, self.rows, end)
            self.keys[:, :, self.rows : end] = key_states
            self.values[:, :, self.rows : end] = value_states
            self.rows = end
            return self.keys[:, :, :end], self.values[:, :, :end]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.rows + query_length, 0

        def get_seq_length(self) -> int:
            return self.rows

        def get_max_length(self) -> int:
            return -1

    return PreallocatedLayer


class TargetCache:
    """`hf` is what a model takes as its cache; `rows` the rows it holds."""

    def __init__(self, num_layers: int) -> None:
        from transformers.cache_utils import Cache

        self._layers = [_layer_class()() for _ in range(num_layers)]
        self.hf: Any = Cache(layers=self._layers)
        self.rows = 0

    def crop(self, rows: int) -> None:
        """Forget all but the first `rows` rows."""
        for layer in self._layers:
            layer.rows = rows
        self.rows = rows


def _buffer(like: Tensor, rows: int) -> Tensor:
    batch, heads, _, width = like.shape
    return like.new_empty(batch, heads, rows, width)


def _with_room(buffer: Tensor, used: int, needed: int) -> Tensor:
    if needed <= buffer.shape[2]:
        return buffer
    grown = _buffer(buffer, max(needed, 2 * buffer.shape[2]))
    grown[:, :, :used] = buffer[:, :, :used]
    return grown
