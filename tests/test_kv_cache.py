# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The cache and who owns its blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.errors import InputError
from sparkgap.kv_cache import FP8, BlockTables, LatentCache


def cache(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> LatentCache:
    layers = tuple(torch.zeros(4, 2, 3).to(dtype) for _ in range(2))
    return LatentCache(layers, (scale, 2 * scale))


def test_rows_go_where_their_slots_say() -> None:
    held = cache()
    latents = torch.arange(2 * 3 * 3.0).view(2, 3, 3) + 1
    held.store(latents, torch.tensor([5, -1, 2]))
    for layer in range(2):
        flat = held.layers[layer].flatten(0, 1)
        assert torch.equal(flat[5], latents[layer, 0])
        assert torch.equal(flat[2], latents[layer, 2])
        assert int((flat != 0).any(-1).sum()) == 2


def test_fp8_rows_are_divided_by_their_layers_scale() -> None:
    held = cache(FP8, scale=0.5)
    held.store(torch.full((2, 1, 3), 3.0), torch.tensor([4]))
    assert float(held.layers[0].float()[2, 0, 0]) == 6.0
    assert float(held.layers[1].float()[2, 0, 0]) == 3.0


@pytest.mark.parametrize("slot", [-2, 8, 10**9])
def test_a_slot_outside_is_refused_before_anything_is_written(slot: int) -> None:
    held = cache()
    with pytest.raises(InputError, match=f"{slot} is outside"):
        held.store(torch.ones(2, 2, 3), torch.tensor([1, slot]))
    assert not held.layers[0].any()


@pytest.mark.parametrize("value", [1000.0, torch.inf, torch.nan])
def test_fp8_overflow_is_refused_before_anything_is_written(value: float) -> None:
    held = cache(FP8)
    latents = torch.ones(2, 1, 3)
    latents[1, 0, 2] = value
    with pytest.raises(InputError, match=r"draft layer 1.*kv_scale of at least"):
        held.store(latents, torch.tensor([3]))
    assert not held.layers[0].float().any()


def test_nothing_is_stored_for_no_rows() -> None:
    held = cache()
    held.store(torch.zeros(2, 0, 3), torch.zeros(0, dtype=torch.int64))
    held.store(torch.ones(2, 2, 3), torch.tensor([-1, -1]))
    assert not held.layers[0].any()


def test_blocks_are_handed_out_and_come_back() -> None:
    tables = BlockTables(num_blocks=4, block_size=2)
    first = tables.extend("a", 0, 3)
    assert len(set(first)) == 3
    assert all(slot >= 2 for slot in first), "block 0 is the null block"
    tables.extend("b", 0, 2)
    assert tables.free_blocks == 0
    assert tables.extend("a", 3, 1)[0] // 2 == first[2] // 2, "the block has room"
    with pytest.raises(InputError, match=r"1 more cache blocks.*0 are free"):
        tables.extend("a", 4, 1)
    tables.release("a")
    assert tables.free_blocks == 2
    tables.release("a")
    assert tables.free_blocks == 2
    assert tables.table(["b", "c"]).tolist()[1] == [0]


def test_a_gap_is_refused_with_nothing_changed() -> None:
    tables = BlockTables(8, 2)
    tables.extend("a", 4, 3)
    with pytest.raises(InputError, match=r"9 leaves a gap.*4 to 6.*at most 7"):
        tables.extend("a", 9, 1)
    with pytest.raises(InputError, match="3 leaves a gap"):
        tables.extend("a", 3, 1)
    assert tables.context_len("a", 7) == 3


def test_context_counts_from_where_it_started() -> None:
    tables = BlockTables(8, 2)
    assert tables.context_len("new", 0) == 0
    tables.extend("late", 10, 4)
    assert tables.context_len("late", 14) == 4
    assert tables.context_len("late", 12) == 2
    for position in (9, 15):
        with pytest.raises(InputError, match="covers positions 10 to 13"):
            tables.context_len("late", position)
    with pytest.raises(InputError, match="no context"):
        tables.context_len("never", 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=40))
def test_no_slot_has_two_owners(steps: list[tuple[int, int]]) -> None:
    tables = BlockTables(num_blocks=9, block_size=4)
    lengths: dict[int, int] = {}
    owned: dict[int, list[int]] = {}
    for request, count in steps:
        if count == 0:
            tables.release(request)
            lengths.pop(request, None)
            owned.pop(request, None)
            continue
        length = lengths.get(request, 0)
        try:
            slots = tables.extend(request, length, count)
        except InputError:
            continue
        lengths[request] = length + count
        owned.setdefault(request, []).extend(slots)
        everything = [slot for held in owned.values() for slot in held]
        assert len(set(everything)) == len(everything)
        assert min(everything) >= 4
