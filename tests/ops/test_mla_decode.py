# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""mla_decode over paged caches in which all that must not be read is NaN."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import FP8, Paged, fill, name
from oracle import assert_close
from sparkgap import ops
from sparkgap.ops.mla_decode import Extent, PagedRows
from sparkgap.primitives.softmax_merge import merge_attention
from sparkgap.verify.tolerance import compare

BF16, FP32 = torch.bfloat16, torch.float32
K3 = {"kv_rank": 512, "rope": 64, "scale": 192**-0.5, "size": 64}


def run(case, filled=None):
    f = filled or fill(case)
    return ops.mla_decode(
        f.query, f.rows, f.extent, case.scale, case.kv_rank, f.block_kv
    )


def inputs_of(filled):
    return filled.query, filled.rows.cache, filled.rows.block_table


def check_mla_decode(case):
    filled = fill(case)
    kept = [t.clone() for t in inputs_of(filled)]
    out, lse = run(case, filled)
    want, want_lse = filled.expected()
    limit, lse_limit = filled.limits()
    assert out.dtype == case.dtype
    assert lse.dtype == FP32
    assert_close(lse, want_lse, lse_limit)
    assert_close(out, want, limit)
    for tensor, before in zip(inputs_of(filled), kept, strict=True):
        same = compare(tensor.float(), before.float(), 0.0)
        assert same.ok, "an input was overwritten"


def check_lost_row():
    """Context lengths at, before and after the ends of blocks: every row counts."""
    for length in (1, 3, 4, 5, 8):
        check_mla_decode(Paged((length,), (1,), q=1, seed=length))


def check_causal_flag():
    for causal in (False, True):
        check_mla_decode(Paged((3, 0), (3, 3), causal=causal, seed=5))


CASES = {
    "one row, no context": Paged((0,), (1,), q=1),
    "one row, one context row": Paged((1,), (1,), q=1),
    "nothing at all": Paged((0,), (0,), q=1),
    "no block rows": Paged((5,), (0,), q=2),
    "no context": Paged((0, 0), (3, 3)),
    "ragged": Paged((1, 17, 4, 8), (3, 3, 3, 3)),
    "ragged blocks": Paged((7, 2, 9), (1, 3, 2)),
    "empty between live": Paged((6, 0, 3), (3, 0, 3)),
    "empty with context": Paged((6, 5, 3), (3, 0, 3)),
    "empty first and last": Paged((0, 6, 0), (0, 3, 0)),
    "block of one row": Paged((5, 6), (3, 3), size=1),
    "block of 64 rows": Paged((63, 64, 65), (3, 3, 3), size=64),
    "full blocks": Paged((4, 8, 12), (3, 3, 3), size=4),
    "many heads": Paged((9, 3), (3, 2), heads=12),
    "one head": Paged((9, 3), (3, 2), heads=1),
    "shared by 3": Paged((9, 9, 9), (3, 3, 3), share=3),
    "shared, other lengths": Paged((9, 2, 0, 5, 17, 1), (3, 1, 3, 0, 3, 2), share=3),
    "int64 ids": Paged((9, 3), (3, 3), ids=torch.int64),
    "large scores": Paged((30, 7), (3, 3), spread=300.0),
    "small scores": Paged((30, 7), (3, 3), spread=1e-6),
}
PLACES = [False, True]


@pytest.mark.parametrize("inside", PLACES, ids=["beside", "in the cache"])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("key", CASES)
def test_cases(key, causal, inside):
    check_mla_decode(replace(CASES[key], causal=causal, inside=inside, seed=len(key)))


@pytest.mark.parametrize("inside", PLACES, ids=["beside", "in the cache"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name)
@pytest.mark.parametrize(
    ("cache", "kv_scale"),
    [(FP32, 1.0), (BF16, 1.0), (FP8, 1.0), (FP8, 0.013), (FP8, 0.5)],
    ids=str,
)
def test_dtypes(dtype, cache, kv_scale, inside):
    case = Paged((9, 0, 33), (3, 1, 2), dtype=dtype, cache=cache, kv_scale=kv_scale)
    check_mla_decode(replace(case, inside=inside, seed=3))


@pytest.mark.parametrize("cache", [FP32, BF16, FP8], ids=name)
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_the_shapes_of_kimi_k3(cache, causal):
    case = Paged((70, 3), (7, 7), q=7, heads=4, cache=cache, dtype=BF16, **K3)
    scale = 0.02 if cache == FP8 else 1.0
    check_mla_decode(replace(case, kv_scale=scale, causal=causal))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_cases(data):
    share = data.draw(st.sampled_from([1, 1, 2, 3]))
    groups = data.draw(st.integers(1, 4))
    q = data.draw(st.integers(1, 5))
    count = share * groups
    lens = data.draw(st.lists(st.integers(0, 21), min_size=count, max_size=count))
    block = data.draw(st.lists(st.integers(0, q), min_size=count, max_size=count))
    case = Paged(
        tuple(lens),
        tuple(block),
        q=q,
        share=share,
        heads=data.draw(st.integers(1, 3)),
        size=data.draw(st.integers(1, 6)),
        causal=data.draw(st.booleans()),
        inside=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([FP32, BF16])),
        seed=data.draw(st.integers(0, 99)),
    )
    check_mla_decode(case)


def test_every_row_of_a_context_counts():
    check_lost_row()


def test_causal_and_whole_blocks_differ_as_they_should():
    check_causal_flag()


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_no_requests(causal):
    check_mla_decode(Paged((), (), causal=causal))


def test_a_table_without_columns():
    """No request has context, so nobody has a block."""
    f = fill(Paged((0, 0), (2, 3), seed=1))
    f.rows = PagedRows(f.rows.cache, f.rows.block_table[:, :0])
    out, lse = run(f.case, f)
    want, want_lse = f.expected()
    assert_close(out, want, f.limits()[0])
    assert_close(lse, want_lse, f.limits()[1])


def test_nothing_to_attend_is_zero():
    out, lse = run(Paged((0, 4), (0, 1), causal=True))
    assert not out[0].any()
    assert bool((lse[0] == -math.inf).all())
    assert bool(lse[1].isfinite().all())


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("cache", [FP32, BF16, FP8], ids=name)
def test_beside_and_inside_are_the_same(causal, cache):
    """The block's rows, given or stored, from the same values: the same result."""
    case = Paged((6, 0, 9), (3, 2, 3), causal=causal, inside=True, cache=cache, seed=4)
    inside = fill(case)
    beside = fill(case)
    width = case.kv_rank + case.rope
    beside.block_kv = torch.full((3, case.q, width), math.nan)
    for r, rows in enumerate(inside.own):
        beside.block_kv[r, : len(rows)] = torch.from_numpy(rows).float()
    for one, other in zip(run(case, inside), run(case, beside), strict=True):
        outcome = compare(one, other.double(), max(inside.limits()))
        assert outcome.ok, outcome.problem


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 12, 13])
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_a_context_split_anywhere_merges_to_the_whole(cut, causal):
    """Rows before the cut through one table, rows after it and the block through
    another; blocks of one row, so that a table can start anywhere."""
    case = Paged((13, 13), (3, 2), size=1, causal=causal, seed=cut)
    f = fill(case)
    table = f.rows.block_table
    none, lens = torch.zeros(2, dtype=torch.int32), f.extent.context_lens
    first = ops.mla_decode(
        f.query,
        PagedRows(f.rows.cache, table[:, :cut]),
        Extent(none + cut, none, causal),
        case.scale,
        case.kv_rank,
        f.block_kv,
    )
    second = ops.mla_decode(
        f.query,
        PagedRows(f.rows.cache, table[:, cut:]),
        Extent(lens - cut, f.extent.block_lens, causal),
        case.scale,
        case.kv_rank,
        f.block_kv,
    )
    out, lse = merge_attention(
        *(torch.stack(pair) for pair in zip(first, second, strict=True))
    )
    want, want_lse = f.expected()
    limit, lse_limit = f.limits()
    assert_close(out, want, 2 * limit)
    assert_close(lse, want_lse, 2 * lse_limit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("inside", PLACES, ids=["beside", "in the cache"])
def test_a_bad_row_touches_only_those_who_see_it(bad, inside):
    """Shared context: request 0 ends before row 5, request 1 sees it."""
    case = Paged((5, 9), (2, 2), q=2, share=2, size=16, inside=inside, seed=6)
    if inside:
        case = replace(case, block=(0, 2))
    f = fill(case)
    clean = run(case, f)
    f.rows.cache[int(f.rows.block_table[0, 0]), 5] = bad
    out, lse = run(case, f)
    assert_close(out[0], clean[0][0].double().numpy(), 0.0)
    assert_close(lse[0], clean[1][0].double().numpy(), 0.0)
    assert not out[1].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_block_row_touches_no_earlier_row_of_a_causal_block(bad):
    case = Paged((5,), (3,), causal=True, seed=7)
    f = fill(case)
    clean = run(case, f)
    f.block_kv[0, 2] = bad
    out, _ = run(case, f)
    assert_close(out[0, :2], clean[0][0, :2].double().numpy(), 0.0)
    assert not out[0, 2].isfinite().all()


def test_a_bad_query_row_touches_no_other():
    f = fill(Paged((5, 6), (3, 3), seed=8))
    clean = run(f.case, f)
    f.query[0, 1] = math.nan
    out, _ = run(f.case, f)
    live = [(r, t) for r, t in np.ndindex(2, 3) if (r, t) != (0, 1)]
    for r, t in live:
        assert torch.equal(out[r, t], clean[0][r, t])


def test_strided_cache():
    """An engine's cache may have gaps between blocks."""
    f = fill(Paged((9, 3), (3, 3), seed=9))
    wide = torch.full((f.rows.cache.shape[0], 2, *f.rows.cache.shape[1:]), math.nan)
    wide[:, 0] = f.rows.cache
    f.rows = PagedRows(wide[:, 0], f.rows.block_table)
    out, _ = run(f.case, f)
    assert_close(out, f.expected()[0], f.limits()[0])
