# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""mla_query: absorbed queries score as plain ones do; the block's own latents."""

import numpy as np
import pytest
import torch

from cases import FLOATS, ROPES, largest, name, rand, table_error
from oracle import assert_close, exact, frequencies, latent, rms_norm, rotate
from sparkgap import ops
from sparkgap.ops.mla_query.reference import QueryWeights
from sparkgap.primitives.rope import rope_table
from sparkgap.verify.tolerance import bound


def weights_of(d, heads, q_rank, nope, rope_dim, kv_rank, dtype):
    """Scaled so that every stage keeps unit size."""
    kv_b = rand(heads, nope + 3, kv_rank, seed=6, dtype=dtype, size=kv_rank**-0.5)
    return QueryWeights(
        rand(q_rank, d, seed=1, dtype=dtype, size=d**-0.5),
        rand(q_rank, seed=2, dtype=dtype),
        rand(heads * (nope + rope_dim), q_rank, seed=3, dtype=dtype, size=q_rank**-0.5),
        rand(kv_rank + rope_dim, d, seed=4, dtype=dtype, size=d**-0.5),
        rand(kv_rank, seed=5, dtype=dtype),
        kv_b[:, :nope],  # a view with gaps, as it lies in kv_b
    )


def plain_query(w, row, place, rope, eps):
    """The query before absorption: nope part [H, nope], rotated part [H, rope]."""
    both = exact(w.q_b) @ rms_norm(exact(w.q_a) @ row, exact(w.q_a_norm), eps)
    both = both.reshape(w.w_uk.shape[0], -1)
    nope = w.w_uk.shape[1]
    return both[:, :nope], np.array([rotate(h[nope:], place, rope) for h in both])


def check_mla_query(
    rows,
    heads,
    key="k3",
    dtype=torch.float32,
    *,
    widths=(24, 12, 8, 16),
    start=0,
    **extra,
):
    (d, q_rank, nope, kv_rank), eps = widths, extra.get("eps", 1e-5)
    rope = ROPES[key]
    w = weights_of(d, heads, q_rank, nope, rope.dim, kv_rank, dtype)
    hidden = rand(rows, d, seed=7, dtype=dtype, size=extra.get("size", 1.0))
    positions = torch.arange(start, start + rows).flip(0)
    kept = hidden.clone()
    q, kv = ops.mla_query(hidden, w, eps, positions, rope_table(rope, start + rows + 1))
    assert q.shape == (rows, heads, kv_rank + rope.dim)
    assert kv.shape == (rows, kv_rank + rope.dim)
    assert q.dtype == kv.dtype == dtype
    assert torch.equal(hidden, kept)
    want_q, want_kv = np.zeros(tuple(q.shape)), np.zeros(tuple(kv.shape))
    for t in range(rows):
        row, place = exact(hidden[t]), int(positions[t])
        flat, turned = plain_query(w, row, place, rope, eps)
        for h in range(heads):
            want_q[t, h] = np.concatenate([flat[h] @ exact(w.w_uk[h]), turned[h]])
        parts = latent(row, exact(w.kv_a), exact(w.kv_a_norm), eps, place, rope)
        want_kv[t] = np.concatenate(parts)
    fastest = max(frequencies(rope.dim, rope.theta, rope.yarn))
    table = 2 * table_error(rope, start + rows, fastest)
    terms = d + q_rank + nope
    # Rounded on the way to q: the q latent, its norm, the plain query.
    limit = bound(dtype, largest(want_q), terms, inner_roundings=3)
    assert_close(q, want_q, table * largest(want_q) + limit)
    limit = bound(dtype, largest(want_kv), d + kv_rank, inner_roundings=1)
    assert_close(kv, want_kv, table * largest(want_kv) + limit)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("heads", [1, 2, 12])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows(rows, heads, dtype):
    check_mla_query(rows, heads, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("key", ROPES)
def test_every_rope(key, dtype):
    check_mla_query(3, 2, key, dtype, start=70)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_eps_decides_for_small_hidden(eps):
    check_mla_query(4, 2, eps=eps, size=1e-3)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_the_head_shapes_of_kimi_k3(dtype):
    check_mla_query(2, 2, dtype=dtype, widths=(512, 192, 128, 512))


@pytest.mark.parametrize("heads", [1, 6])
def test_absorbed_scores_are_plain_scores(heads):
    """q . [c | k_pe] is nope . (W_UK c) + pe . k_pe, for any latent row."""
    rope = ROPES["k3"]
    w = weights_of(24, heads, 12, 8, rope.dim, 16, torch.float32)
    hidden, key = rand(1, 24, seed=8), exact(rand(16 + rope.dim, seed=9))
    q, _ = ops.mla_query(hidden, w, 1e-5, torch.tensor([5]), rope_table(rope, 8))
    flat, turned = plain_query(w, exact(hidden[0]), 5, rope, 1e-5)
    want = [
        flat[h] @ (exact(w.w_uk[h]) @ key[:16]) + turned[h] @ key[16:]
        for h in range(heads)
    ]
    got = torch.from_numpy(exact(q[0]) @ key)
    limit = bound(torch.float32, 3 * largest(key) * largest(exact(q)) * 9, 64)
    assert_close(got, np.array(want), limit)


def test_rows_do_not_mix():
    w = weights_of(8, 2, 6, 4, 16, 8, torch.float32)
    hidden = rand(4, 8, seed=7)
    hidden[1, 0] = float("nan")
    table = rope_table(ROPES["plain-theta-1e6"], 8)
    q, kv = ops.mla_query(hidden, w, 1e-5, torch.arange(4), table)
    assert q.flatten(1).isnan().any(dim=1).tolist() == [False, True, False, False]
    assert kv.isnan().any(dim=1).tolist() == [False, True, False, False]
