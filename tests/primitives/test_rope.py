# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The rotary table against exact cosines and sines, and the rotation by it."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from cases import FLOATS, ROPES, largest, name, rand, table_error
from oracle import assert_close, exact, frequencies, rotate, table_magnitude
from sparkgap.primitives import rope as rope_module
from sparkgap.primitives.rope import rope_table
from sparkgap.verify.tolerance import bound

LENGTH = 4100
PLACES = (0, 1, 2, 63, 64, 1000, 4095, 4099)


def check_rotate(key, positions, shape, dtype):
    """x [..., dim] at positions that broadcast over its leading dimensions."""
    rope = ROPES[key]
    x = rand(*shape, rope.dim, seed=1, dtype=dtype)
    table = rope_table(rope, LENGTH)
    kept = x.clone()
    out = rope_module.rotate(x, positions, table)
    places = np.broadcast_to(positions.numpy(), shape)
    want, values = np.zeros((*shape, rope.dim)), exact(x)
    for index in np.ndindex(*shape):
        want[index] = rotate(values[index], int(places[index]), rope)
    assert out.dtype == dtype
    assert out.shape == x.shape
    fastest = max(frequencies(rope.dim, rope.theta, rope.yarn))
    farthest = int(places.max()) if places.size else 0
    off = 2 * table_error(rope, farthest, fastest) * largest(values)
    assert_close(out, want, off + bound(dtype, largest(want), 2))
    assert torch.equal(x, kept), "the input was overwritten"


def check_interleaved():
    """Pairs are (0, 1), (2, 3), ...: the first vector turns into the second."""
    x = torch.zeros(1, 4)
    x[0, 0] = 1.0
    table = torch.tensor([[0.0, 1.0, 1.0, 0.0]])  # cosines 0, 1; sines 1, 0
    assert rope_module.rotate(x, torch.tensor([0]), table).tolist() == [[0, 1, 0, 0]]


def check_position():
    for place in (1, 63, 1000):
        check_rotate("k3", torch.tensor([place]), (1,), torch.float32)


@pytest.mark.parametrize("key", ROPES)
def test_table_holds_cosines_then_sines(key):
    rope = ROPES[key]
    table = rope_table(rope, LENGTH)
    assert table.dtype == torch.float32
    assert table.shape == (LENGTH, rope.dim)
    half, size = rope.dim // 2, table_magnitude(rope.yarn)
    for place in PLACES:
        for i, frequency in enumerate(frequencies(rope.dim, rope.theta, rope.yarn)):
            limit = table_error(rope, place, frequency)
            angle = place * frequency
            want = (size * math.cos(angle), size * math.sin(angle))
            got = (float(table[place, i]), float(table[place, half + i]))
            assert got == pytest.approx(want, rel=0, abs=limit), (place, i)


@pytest.mark.parametrize(
    ("key", "size"), [("k3", 1.0), ("bare", 1.3466), ("plain", 1.0), ("factor-1", 1.0)]
)
def test_table_magnitude(key, size):
    table = rope_table(ROPES[key], 8)
    half = ROPES[key].dim // 2
    length = (table[:, :half] ** 2 + table[:, half:] ** 2).sqrt()
    assert length.numpy() == pytest.approx(size, abs=1e-4)


def test_table_far_out_is_within_what_fp32_angles_allow():
    """A million positions: the angle alone errs by 1/16, yet only by that."""
    rope = ROPES["k3"]
    table = rope_table(rope, 1048576)
    half = rope.dim // 2
    for place in (131072, 1048575):
        for i, frequency in enumerate(frequencies(rope.dim, rope.theta, rope.yarn)):
            limit = table_error(rope, place, frequency)
            want = math.cos(place * frequency), math.sin(place * frequency)
            got = (float(table[place, i]), float(table[place, half + i]))
            assert got == pytest.approx(want, rel=0, abs=limit), (place, i)


@pytest.mark.parametrize("key", ["plain", "k3", "bare", "factor-10"])
def test_table_is_the_engines_fp32_recipe(key):
    """Far positions agree with the serving engine only if the frequencies and angles
    are rounded to fp32 as it rounds them: power, reciprocal, ramp, product."""
    rope = ROPES[key]
    powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float) / rope.dim)
    inverse = 1.0 / powers
    if rope.yarn is not None:
        # theta 5e4 and 32768 positions: pair 15.03 turns 32 times, pair 25.3 once.
        low, high = (15, 26)
        ramp = (
            (torch.arange(rope.dim // 2, dtype=torch.float) - low) / (high - low)
        ).clamp(0, 1)
        keep = 1 - ramp
        inverse = 1.0 / (rope.yarn.factor * powers) * (1 - keep) + inverse * keep
    angle = torch.outer(torch.arange(200000, dtype=torch.float), inverse)
    size = table_magnitude(rope.yarn)
    want = torch.cat([angle.cos() * size, angle.sin() * size], dim=-1)
    got = rope_table(rope, 200000)
    assert_close(got, exact(want), 0.0)


@pytest.mark.parametrize("key", ROPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_rotation(key, dtype):
    check_rotate(key, torch.tensor(PLACES), (len(PLACES),), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_positions_broadcast_over_heads(dtype):
    check_rotate("k3", torch.tensor([[5], [9], [2]]), (3, 4), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_positions_broadcast_over_layers(dtype):
    check_rotate("k3", torch.tensor([5, 9, 2]), (4, 3), dtype)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)], ids=str)
def test_nothing_to_rotate(shape):
    positions = torch.zeros(shape, dtype=torch.int64)
    check_rotate("plain", positions, shape, torch.float32)


def test_pairs_are_interleaved():
    check_interleaved()


def test_neighbouring_positions_differ():
    check_position()


def test_position_zero_changes_nothing():
    x = rand(3, 64, seed=2)
    out = rope_module.rotate(
        x, torch.zeros(3, dtype=torch.int64), rope_table(ROPES["k3"], 4)
    )
    assert torch.equal(out, x)


def test_scores_depend_on_the_distance_alone():
    rope = ROPES["k3"]
    table = rope_table(rope, 600)
    q, k = rand(1, 64, seed=3), rand(1, 64, seed=4)
    scores = []
    for start in (0, 100, 500):
        turned = [
            rope_module.rotate(x, torch.tensor([place]), table)
            for x, place in ((q, start + 40), (k, start + 7))
        ]
        scores.append(float((turned[0] * turned[1]).sum()))
    for one, other in pairwise(scores):
        limit = 4 * 64 * table_error(rope, 600, 1.0)
        assert one == pytest.approx(other, abs=limit)
