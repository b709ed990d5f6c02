# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""gated_mlp: the first half of gate_up gates, the second is gated."""

import numpy as np
import pytest
import torch

from cases import FLOATS, largest, name, rand
from oracle import assert_close, exact, gated_mlp
from sparkgap import ops
from sparkgap.verify.tolerance import bound


def check_gated_mlp(rows, d, inner, dtype, size=1.0):
    x = rand(rows, d, seed=1, dtype=dtype, size=size)
    gate_up = rand(2 * inner, d, seed=2, dtype=dtype, size=d**-0.5)
    down = rand(d, inner, seed=3, dtype=dtype, size=inner**-0.5)
    kept = x.clone()
    out = ops.gated_mlp(x, gate_up, down)
    want = [gated_mlp(row, exact(gate_up), exact(down)) for row in exact(x)]
    want = np.array(want).reshape(rows, d)
    assert out.dtype == dtype
    # gate and up are rounded once each, their product once, the result once.
    limit = bound(dtype, largest(want), d + inner, inner_roundings=3)
    assert_close(out, want, limit)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize(
    ("rows", "d", "inner"),
    [(0, 8, 16), (1, 8, 16), (1, 1, 1), (7, 33, 65), (3, 256, 512), (64, 16, 8)],
)
def test_rows(dtype, rows, d, inner):
    check_gated_mlp(rows, d, inner, dtype)


@pytest.mark.parametrize("size", [1e-4, 30.0, 1e4])
def test_gates_far_from_zero(size):
    """SiLU at ±30 and ±1e4 is the identity and 0, to the last bit that matters."""
    check_gated_mlp(3, 16, 32, torch.float32, size)


def test_a_bad_row_touches_no_other():
    x, gate_up, down = rand(3, 8, seed=4), rand(12, 8, seed=5), rand(8, 6, seed=6)
    clean = ops.gated_mlp(x, gate_up, down)
    x[1, 0] = float("nan")
    out = ops.gated_mlp(x, gate_up, down)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert bool(out[1].isnan().all())
