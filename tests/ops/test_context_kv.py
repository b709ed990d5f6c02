# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""context_kv: the latent rows of every layer from the context features."""

import numpy as np
import pytest
import torch

from cases import FLOATS, ROPES, largest, name, rand, table_error
from oracle import assert_close, exact, frequencies, latent
from sparkgap import ops
from sparkgap.primitives.rope import rope_table
from sparkgap.verify.tolerance import bound


def check_context_kv(
    rows, layers, key="k3", dtype=torch.float32, *, widths=(24, 16), start=0, **extra
):
    (d, rank), eps, size = widths, extra.get("eps", 1e-5), extra.get("size", 1.0)
    rope = ROPES[key]
    features = rand(rows, d, seed=1, dtype=dtype, size=size)
    kv_a = [
        rand(rank + rope.dim, d, seed=2 + i, dtype=dtype, size=d**-0.5)
        for i in range(layers)
    ]
    norms = [rand(rank, seed=20 + i, dtype=dtype) for i in range(layers)]
    positions = torch.arange(start, start + rows).flip(0)
    out = ops.context_kv(
        features, kv_a, norms, eps, positions, rope_table(rope, start + rows + 1)
    )
    assert out.shape == (layers, rows, rank + rope.dim)
    assert out.dtype == dtype
    want = np.zeros((layers, rows, rank + rope.dim))
    for i, c in np.ndindex(layers, rows):
        parts = latent(
            exact(features[c]),
            exact(kv_a[i]),
            exact(norms[i]),
            eps,
            int(positions[c]),
            rope,
        )
        want[i, c] = np.concatenate(parts)
    fastest = max(frequencies(rope.dim, rope.theta, rope.yarn))
    off = 2 * table_error(rope, start + rows, fastest) * largest(want)
    # The projection is rounded before it is normed and turned, as engines do.
    limit = bound(dtype, largest(want), d + rank, inner_roundings=1)
    assert_close(out, want, off + limit)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
def test_rows(rows, layers, dtype):
    check_context_kv(rows, layers, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("key", ROPES)
def test_every_rope(key, dtype):
    check_context_kv(3, 2, key, dtype, start=50)


@pytest.mark.parametrize("start", [1, 5000])
def test_late_start(start):
    check_context_kv(4, 1, start=start)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_eps_decides_for_small_features(eps):
    check_context_kv(4, 2, eps=eps, size=1e-3)


def test_the_shapes_of_kimi_k3():
    check_context_kv(2, 1, dtype=torch.bfloat16, widths=(7168, 512))


def test_layers_do_not_mix():
    """A NaN weight in layer 1 stays there."""
    kv_a = [rand(20, 8, seed=i) for i in range(3)]
    kv_a[1][:] = float("nan")
    norms = [rand(4, seed=9 + i) for i in range(3)]
    table = rope_table(ROPES["plain-theta-1e6"], 8)
    out = ops.context_kv(rand(5, 8, seed=7), kv_a, norms, 1e-5, torch.arange(5), table)
    assert out.isnan().flatten(1).any(dim=1).tolist() == [False, True, False]


def test_rows_do_not_mix():
    features = rand(4, 8, seed=7)
    features[2] = float("nan")
    kv_a, norms = [rand(20, 8, seed=1)], [rand(4, seed=9)]
    table = rope_table(ROPES["plain-theta-1e6"], 8)
    out = ops.context_kv(features, kv_a, norms, 1e-5, torch.arange(4), table)
    assert out[0].isnan().any(dim=1).tolist() == [False, False, True, False]
