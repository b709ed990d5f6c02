# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The bounds are what they say, and comparing finds every kind of difference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.verify.tolerance import (
    bound,
    compare,
    norm_error,
    relative_error,
    ulp,
)

NAN, INF = math.nan, math.inf


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_ulp_is_the_distance_to_the_next_number(value):
    above = np.nextafter(np.float32(value), np.float32(np.inf))
    assert ulp(torch.float32, value) == float(above) - value


@pytest.mark.parametrize(
    ("dtype", "value", "want"),
    [
        (torch.bfloat16, 1.0, 2.0**-7),
        (torch.bfloat16, 1.99, 2.0**-7),
        (torch.bfloat16, 2.0, 2.0**-6),
        (torch.float16, 1.0, 2.0**-10),
        (torch.float32, 0.0, 2.0**-149),
        (torch.float32, math.inf, 2.0**-149),
    ],
)
def test_ulp(dtype, value, want):
    assert ulp(dtype, value) == want


def test_one_exact_product_is_rounded_once():
    assert bound(torch.bfloat16, 1.0, 1) == 0.5 * 2**-7 + 2 * 2**-23


def test_a_bound_grows_with_the_root_of_the_sum():
    rounding = bound(torch.float32, 1.0, 0) - 2 * 2**-23
    few, many = (bound(torch.float32, 1.0, n) - rounding for n in (100, 10000))
    assert many == pytest.approx(10 * few)


@pytest.mark.parametrize("terms", [16, 256, 4096])
def test_real_sums_use_a_good_part_of_the_bound_and_no_more(terms):
    """One after the other, as no library does: within the bound, and above 1/50 of it,
    so that the bound is not an empty promise."""
    rng = np.random.default_rng(terms)
    a = rng.normal(size=(terms, 400)).astype(np.float32)
    b = rng.normal(size=(terms, 400)).astype(np.float32)
    total = np.zeros(400, np.float32)
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    exact = (a.astype(np.float64) * b).sum(axis=0)
    limit = bound(torch.float32, float(np.abs(exact).max()), terms)
    worst = float(np.abs(total - exact).max())
    assert limit / 50 < worst < limit


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5]),
        ([1.0, NAN], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, NAN]),
        ([1.0, INF], [1.0, -INF]),
        ([1.0, INF], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, INF]),
        ([1.0, NAN], [1.0, INF]),
    ],
    ids=str,
)
def test_differences_are_found(actual, expected):
    outcome = compare(torch.tensor(actual), torch.tensor(expected), 0.25)
    assert not outcome.ok
    assert outcome.worst > 0.25
    assert "worst at [1]" in outcome.problem


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, NAN, INF, -INF], [1.25, NAN, INF, -INF]),
        ([0.0, -0.0], [-0.0, 0.0]),
        ([], []),
    ],
    ids=str,
)
def test_equals_are_equal(actual, expected):
    outcome = compare(torch.tensor(actual), torch.tensor(expected), 0.25)
    assert outcome.ok, outcome.problem


def test_shapes_must_match():
    outcome = compare(torch.zeros(2, 1), torch.zeros(2), 1.0)
    assert outcome.problem == "shape [2, 1], expected [2]"


def test_the_worst_element_is_named():
    actual, expected = torch.zeros(2, 3), torch.zeros(2, 3)
    actual[1, 2], actual[0, 1] = 4.0, 3.0
    outcome = compare(actual, expected, 1.0)
    assert outcome.problem.startswith(
        "2 of 6 elements off; worst at [1, 2]: 4.0, not 0.0"
    )


def test_relative_errors():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.4]), expected) == pytest.approx(0.1)
    assert norm_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert norm_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0.0
