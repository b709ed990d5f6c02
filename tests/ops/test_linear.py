# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""linear: every output element is one dot product, accumulated in fp32."""

import numpy as np
import pytest
import torch

from cases import FLOATS, largest, name, rand
from oracle import assert_close, exact
from sparkgap.ops.linear import linear
from sparkgap.primitives import packed
from sparkgap.verify.tolerance import bound


def check_linear(x, weight, bias=None, out_dtype=None, given=None):
    """`given`: what stands for the weight, by default itself."""
    out = linear(x, weight if given is None else given, bias, out_dtype)
    rows, columns = exact(x), exact(weight)
    want = np.array([[float(w @ r) for w in columns] for r in rows])
    want = want.reshape(len(rows), len(columns))
    if bias is not None:
        want = want + exact(bias)
    assert out.dtype == (out_dtype or x.dtype)
    # Partial sums of K products of unit normals reach 3 sqrt(K), whatever they end at.
    reach = (
        3 * np.sqrt(x.shape[1]) * exact(weight).std() * exact(x).std()
        if x.numel()
        else 0.0
    )
    limit = bound(out.dtype, max(largest(want), float(reach)), x.shape[1])
    assert_close(out, want, limit)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (0, 5, 7),
        (1, 1, 1),
        (1, 17, 33),
        (3, 8, 64),
        (13, 3, 1000),
        (2, 2, 4096),
        (64, 5, 8),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_dot_products(dtype, m, n, k, with_bias):
    bias = rand(n, seed=3, dtype=dtype) if with_bias else None
    check_linear(rand(m, k, seed=1, dtype=dtype), rand(n, k, seed=2, dtype=dtype), bias)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 17, 33), (7, 96, 64), (13, 3, 1000), (64, 5, 8)]
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_a_packed_weight_is_the_same_weight(m, n, k, with_bias):
    weight = rand(n, k, seed=2, dtype=torch.bfloat16)
    if not packed.can_pack(weight):
        pytest.skip("this torch, on this machine, packs no bfloat16 weight")
    bias = rand(n, seed=3, dtype=torch.bfloat16) if with_bias else None
    x = rand(m, k, seed=1, dtype=torch.bfloat16)
    given = packed.pack(weight, 8)
    assert given.is_mkldnn
    check_linear(x, weight, bias, given=given)


def test_only_bfloat16_is_packed():
    assert not packed.can_pack(torch.zeros(2, 2))
    assert not packed.can_pack(torch.zeros(2, 2, dtype=torch.float16))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_a_wider_output_skips_the_rounding(with_bias):
    """bf16 operands, fp32 out: the bound is fp32's, 65536 times tighter than bf16's."""
    x = rand(4, 512, seed=4, dtype=torch.bfloat16)
    weight = rand(9, 512, seed=5, dtype=torch.bfloat16)
    bias = rand(9, seed=6, dtype=torch.bfloat16) if with_bias else None
    check_linear(x, weight, bias, torch.float32)


def test_a_narrower_output_is_rounded_once():
    x, weight = rand(4, 512, seed=7), rand(9, 512, seed=8)
    out = linear(x, weight, None, torch.bfloat16)
    wide = linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.to(torch.bfloat16))


def test_cancelling_sums_keep_fp32_accuracy():
    """±1 in every place and a small rest: the sum is what is left of 2048 ones."""
    x = torch.ones(1, 2049, dtype=torch.bfloat16)
    weight = torch.ones(1, 2049, dtype=torch.bfloat16)
    weight[0, 1::2] = -1
    weight[0, 2048] = 2.0**-7
    out = linear(x, weight, None, torch.float32)
    assert out.item() == 2.0**-7


def test_strided_operands():
    check_linear(rand(6, 40, seed=9)[::2, :32], rand(32, 10, seed=10).T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_touches_no_other(bad):
    x, weight = rand(3, 16, seed=11), rand(4, 16, seed=12)
    clean = linear(x, weight)
    x[1, 2] = bad
    out = linear(x, weight)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not out[1].isfinite().any()


def test_a_bad_weight_row_touches_one_column():
    x, weight = rand(3, 16, seed=13), rand(4, 16, seed=14)
    weight[2, 5] = float("nan")
    assert linear(x, weight).isnan().all(dim=0).tolist() == [False, False, True, False]
