# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""embed copies rows, whatever they hold."""

import pytest
import torch

from cases import FLOATS, name, rand
from sparkgap.ops.embed import embed

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), 1e-40, 3e38)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32], ids=name)
@pytest.mark.parametrize(
    "ids", [[], [0], [10], [0, 10, 0, 3, 3, 9], list(range(10, -1, -1))], ids=str
)
def test_rows_are_copied_bitwise(dtype, id_dtype, ids):
    table = rand(11, 6, seed=1, dtype=dtype)
    table[3] = torch.tensor(SPECIAL).to(dtype)
    out = embed(torch.tensor(ids, dtype=id_dtype), table)
    assert out.shape == (len(ids), 6)
    assert out.dtype == dtype
    as_int = torch.int32 if dtype == torch.float32 else torch.int16
    for row, i in zip(out, ids, strict=True):
        assert row.view(as_int).tolist() == table[i].view(as_int).tolist()


def test_a_table_with_gaps_between_rows():
    table = rand(5, 12, seed=2)[:, ::3]
    out = embed(torch.tensor([4, 1]), table)
    assert torch.equal(out, torch.stack([table[4], table[1]]))


def test_nan_rows_stay_where_they_are():
    table = rand(4, 3, seed=3)
    table[2] = float("nan")
    out = embed(torch.tensor([1, 2, 1]), table)
    assert out.isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]
