# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""confidence: a sigmoid of one dot product, fp32 whatever the inputs are."""

import numpy as np
import pytest
import torch

from cases import FLOATS, name, rand
from oracle import assert_close, exact, sigmoid
from sparkgap.ops.confidence import confidence
from sparkgap.verify.tolerance import bound


def check_confidence(shape, rank, dtype, size=1.0, bias=0.25):
    d = shape[-1]
    hidden = rand(*shape, seed=1, dtype=dtype)
    previous = rand(*shape[:-1], rank, seed=2, dtype=dtype) if rank else None
    weight = rand(1, d + rank, seed=3, dtype=dtype, size=size)
    offset = torch.tensor([bias], dtype=dtype)
    out = confidence(hidden, previous, weight, offset)
    row = exact(hidden)
    if previous is not None:
        row = np.concatenate([row, exact(previous)], axis=-1)
    logit = np.sum(row * exact(weight)[0], axis=-1) + exact(offset)[0]
    assert out.dtype == torch.float32
    assert out.shape == shape[:-1]
    assert bool(((out >= 0) & (out <= 1)).all())
    # The sigmoid's slope is at most 1/4, so the logit's error is an upper bound.
    reach = max(3 * size * np.sqrt(d + rank), abs(bias))
    assert_close(out, sigmoid(logit), bound(torch.float32, reach, d + rank))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("rank", [0, 1, 16], ids="rank{}".format)
@pytest.mark.parametrize(
    "shape", [(0, 8), (1, 8), (5, 33), (2, 7, 64), (0, 7, 64)], ids=str
)
def test_rows(dtype, rank, shape):
    check_confidence(shape, rank, dtype)


@pytest.mark.parametrize("bias", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_sure_heads_stay_finite(bias):
    check_confidence((3, 8), 4, torch.float32, bias=bias)


def test_hidden_comes_first():
    """The weight's first d columns are for the hidden row, the rest for W1."""
    hidden, previous = torch.ones(1, 2), torch.ones(1, 3)
    weight = torch.tensor([[1.0, 1.0, -5.0, 0.0, 0.0]])
    out = confidence(hidden, previous, weight, torch.zeros(1))
    assert out.item() == pytest.approx(float(sigmoid(np.array(-3.0))), rel=1e-6)


def test_a_bad_row_touches_no_other():
    hidden, weight = rand(3, 8, seed=4), rand(1, 8, seed=5)
    clean = confidence(hidden, None, weight, torch.zeros(1))
    hidden[1, 3] = float("nan")
    out = confidence(hidden, None, weight, torch.zeros(1))
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert bool(out[1].isnan())
