# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""merge_attention: parts of one softmax, put together, are the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import largest
from oracle import assert_close, softmax_mix
from sparkgap.primitives.softmax_merge import merge_attention
from sparkgap.verify.tolerance import bound


def whole_and_parts(cuts, rows, keys, width, seed, spread=1.0, dtype=torch.float32):
    """Random scores [rows, keys], values [keys, width]; parts end at the cuts."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(rows, keys)) * spread
    values = rng.normal(size=(keys, width))
    edges = [0, *sorted(cuts), keys]
    outs, lses = (
        np.zeros((len(edges) - 1, rows, width)),
        np.zeros((len(edges) - 1, rows)),
    )
    for s, (start, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        for i in range(rows):
            outs[s, i], lses[s, i] = softmax_mix(
                scores[i, start:end], values[start:end]
            )
    want = [softmax_mix(row, values) for row in scores]
    out = np.array([w[0] for w in want]).reshape(rows, width)
    lse = np.array([w[1] for w in want])
    return torch.from_numpy(outs).to(dtype), torch.from_numpy(lses).float(), out, lse


def check_merge(
    cuts, rows=3, keys=40, width=8, seed=0, spread=1.0, dtype=torch.float32
):
    outs, lses, want, want_lse = whole_and_parts(
        cuts, rows, keys, width, seed, spread, dtype
    )
    out, lse = merge_attention(outs, lses)
    parts = len(cuts) + 1
    # A part's weight is e^lse: its error is that of lse; so is that of the merged lse.
    off = bound(
        torch.float32, max(largest(want_lse[np.isfinite(want_lse)]), 1.0), parts
    )
    value = max(largest(outs.double().numpy()), 1.0)
    assert lse.dtype == torch.float32
    assert_close(lse, want_lse, 2 * off)
    assert_close(
        out, want, 2 * off * value + bound(dtype, value, parts, inner_roundings=1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cuts",
    [[], [20], [1], [39], [0], [40], [0, 0, 40], [10, 10, 10, 30], list(range(1, 40))],
    ids=str,
)
def test_any_split(cuts, dtype):
    check_merge(cuts, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 24), max_size=8),
    keys=st.just(24),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_random_splits(cuts, keys, spread, seed):
    check_merge(cuts, keys=keys, seed=seed, spread=spread)


def test_one_part_is_itself():
    outs, lses, _, _ = whole_and_parts([], 3, 9, 4, 1)
    out, lse = merge_attention(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])


@pytest.mark.parametrize("parts", [1, 3])
def test_nothing_seen(parts):
    out, lse = merge_attention(
        torch.zeros(parts, 2, 4), torch.full((parts, 2), -math.inf)
    )
    assert not out.any()
    assert out.shape == (2, 4)
    assert lse.tolist() == [-math.inf] * 2


def test_an_empty_part_adds_nothing():
    outs, lses, want, want_lse = whole_and_parts([12, 12], 3, 24, 4, 2)
    assert lses[1].tolist() == [-math.inf] * 3
    with_it = merge_attention(outs, lses)
    without = merge_attention(outs[[0, 2]], lses[[0, 2]])
    for one, other in zip(with_it, without, strict=True):
        assert torch.equal(one, other)
    assert_close(with_it[0], want, bound(torch.float32, 4.0, 8))
    assert_close(with_it[1], want_lse, bound(torch.float32, 8.0, 8))


@pytest.mark.parametrize("shift", [1e4, -1e4, 300.0])
def test_far_from_zero_nothing_overflows(shift):
    outs, lses, want, _ = whole_and_parts([7, 20], 3, 24, 4, 3)
    out, lse = merge_attention(outs, lses + shift)
    # lse itself is now rounded at 1e4, and so are the weights.
    assert_close(out, want, 8 * bound(torch.float32, abs(shift), 3))
    assert bool(lse.isfinite().all())


def test_a_part_far_above_wins():
    outs = torch.tensor([[[1.0, 2.0]], [[5.0, -7.0]]])
    out, lse = merge_attention(outs, torch.tensor([[0.0], [500.0]]))
    assert out.tolist() == [[5.0, -7.0]]
    assert lse.tolist() == [500.0]


def test_leading_dimensions():
    outs, lses, want, want_lse = whole_and_parts([5], 12, 24, 4, 4)
    out, lse = merge_attention(outs.view(2, 2, 3, 2, 4), lses.view(2, 2, 3, 2))
    assert_close(out.flatten(0, 2), want, bound(torch.float32, 8.0, 8))
    assert_close(lse.flatten(), want_lse, bound(torch.float32, 8.0, 8))


def test_no_rows():
    out, lse = merge_attention(torch.zeros(3, 0, 4), torch.zeros(3, 0))
    assert out.shape == (0, 4)
    assert lse.shape == (0,)
