# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""norm and add_norm against the formula in float64."""

import numpy as np
import pytest
import torch

from cases import FLOATS, largest, name, rand
from oracle import assert_close, exact, rms_norm
from sparkgap import ops
from sparkgap.verify.tolerance import bound


def expected(x, weight, eps):
    """Row by row; weight [n], or [L, n] over x [C, L, n]."""
    flat = exact(x).reshape(-1, x.shape[-1])
    weights = np.broadcast_to(exact(weight), tuple(x.shape)).reshape(flat.shape)
    rows = [rms_norm(r, w, eps) for r, w in zip(flat, weights, strict=True)]
    return np.array(rows).reshape(tuple(x.shape))


def check_norm(x, weight, eps):
    before = x.clone()
    out = ops.norm(x, weight, eps)
    want = expected(x, weight, eps)
    assert out.dtype == x.dtype
    assert_close(out, want, bound(x.dtype, largest(want), x.shape[-1]))
    assert torch.equal(x, before), "the input was overwritten"


def check_eps():
    """Rows so small that eps decides: with eps 1e-5 and 1e-6 they differ 3-fold."""
    for eps in (1e-5, 1e-6, 1e-2):
        check_norm(rand(4, 32, seed=1, size=1e-3), rand(32, seed=2), eps)


def check_add_norm(dtype, shape, eps=1e-5, size=1.0):
    x = rand(*shape, seed=3, dtype=dtype, size=size)
    residual = rand(*shape, seed=4, dtype=dtype, size=size * 3)
    weight = rand(shape[-1], seed=5, dtype=dtype)
    kept = x.clone(), residual.clone()
    out, total = ops.add_norm(x, residual, weight, eps)
    assert out.dtype == total.dtype == dtype
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    # The norm is taken of the rounded sum, not of the exact one.
    want = expected(total, weight, eps)
    assert_close(out, want, bound(dtype, largest(want), shape[-1]))
    assert torch.equal(x, kept[0]), "x was overwritten"
    assert torch.equal(residual, kept[1]), "the residual was overwritten"


SHAPES = [(0, 8), (1, 8), (7, 1), (5, 33), (2, 3, 16), (3, 1000), (64,)]


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_norm(dtype, shape, eps):
    x = rand(*shape, seed=6, dtype=dtype)
    check_norm(x, rand(shape[-1], seed=7, dtype=dtype), eps)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e15])
def test_norm_of_any_magnitude(size):
    check_norm(rand(3, 40, seed=8, size=size), rand(40, seed=9), 1e-5)


def test_eps_decides_for_small_rows():
    check_eps()


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_one_weight_per_layer(dtype, rows):
    x = rand(rows, 3, 16, seed=10, dtype=dtype)
    check_norm(x, rand(3, 16, seed=11, dtype=dtype), 1e-5)


def test_a_zero_row_stays_zero():
    x = rand(3, 8, seed=12)
    x[1] = 0
    out = ops.norm(x, rand(8, seed=13), 1e-5)
    assert out[1].tolist() == [0.0] * 8
    check_norm(x, rand(8, seed=13), 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_row_touches_no_other(bad):
    x, weight = rand(3, 8, seed=14), rand(8, seed=15)
    clean = ops.norm(x, weight, 1e-5)
    x[1, 4] = bad
    out = ops.norm(x, weight, 1e-5)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert bool(out[1, 4].isnan())


def test_strided_input():
    check_norm(rand(6, 40, seed=16)[::2, 3:35], rand(64, seed=17)[::2], 1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_add_norm(dtype, shape):
    check_add_norm(dtype, shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_add_norm_of_small_rows(dtype):
    check_add_norm(dtype, (4, 32), eps=1e-2, size=1e-2)


def test_add_norm_cancels_exactly():
    x = rand(2, 8, seed=18)
    out, total = ops.add_norm(x, -x, rand(8, seed=19), 1e-5)
    assert not total.any()
    assert not out.any()
