# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A whole step of the model, from taps to tokens, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cases import FP8
from geometry import Geometry, batch, with_ties
from oracle import Oracle, exact
from sparkgap.kv_cache import LatentCache
from sparkgap.model import step
from sparkgap.verify.tolerance import (
    STEP_BF16,
    STEP_FP32,
    norm_error,
    relative_error,
)

RAGGED = (9, 0, 17, 1, 8)
GEOMETRIES = {
    "plain": Geometry(rope="plain", context=(5,)),
    "k3": Geometry(heads=4, layers=2, confidence="markov", context=(8, 3)),
    "causal": Geometry(heads=3, layers=2, causal=True, context=(7, 0, 20)),
    "ragged": Geometry(heads=6, context=RAGGED, taps=5, start=(0, 3)),
    "three layers": Geometry(heads=12, layers=3, context=(11, 2, 4)),
    "fc_norm": Geometry(heads=2, layers=2, fc_norm=True, context=(6, 9), taps=4),
    "fill-in": Geometry(heads=4, layers=2, fill_in=True, rows=6, context=(3, 0, 12)),
    "fill-in, causal": Geometry(
        fill_in=True,
        causal=True,
        rows=5,
        markov="rnn",
        confidence="markov",
        draft_vocab=31,
        context=(4, 16),
        layers=2,
    ),
    "d2t": Geometry(heads=2, draft_vocab=24, context=(9, 2), confidence="hidden"),
    "gated": Geometry(heads=5, markov="gated", context=(9, 2), confidence="markov"),
    "rnn": Geometry(heads=7, markov="rnn", context=(9, 2, 0), confidence="hidden"),
    "no markov head": Geometry(markov=None, context=(9, 2), confidence="hidden"),
    "bare yarn": Geometry(rope="bare", context=(9, 2), layers=2),
    "odd yarn": Geometry(rope="mscales", heads=8, context=(30, 2), start=(40,)),
    "scale without mscale": Geometry(rope="llama-scaling", context=(9, 2)),
    "one tap": Geometry(taps=1, context=(4, 9, 9, 0)),
    "one row": Geometry(rows=1, context=(4, 9), layers=2),
    "one draft, fill-in": Geometry(rows=2, fill_in=True, context=(4, 9)),
    "late start": Geometry(context=(5, 0), start=(300,), rope="factor-10"),
    "no context": Geometry(context=(0, 0), layers=2),
    "no requests": Geometry(context=()),
    "small taps": Geometry(context=(9, 3), tap_size=1e-3, eps=1e-5),
    "large eps": Geometry(context=(9, 3), eps=0.1, layers=2),
}


def run(case, numerics="fp32"):
    """hidden [R, q, d] and the draft, stage by stage and by `step`: the same bits."""
    whole = step(case.model, case.buffers, numerics)
    b, cache = case.buffers, case.buffers.cache
    hidden = case.model.block(b.block, cache.layers, cache.kv_scales)
    draft = case.model.sample(hidden, b.block.ids[:, 0], b.sampling, numerics)
    assert torch.equal(draft.tokens, whole.tokens)
    assert torch.equal(draft.logits, whole.logits)
    return hidden, draft


def wanted(case, draft):
    """The oracle's step along the tokens that the model took."""
    return Oracle(case.config, case.weights).step(case.requests, draft.tokens.tolist())


def check_tokens(case, draft, want):
    """The oracle's own choice, unless it is nearer to the next than twice the error."""
    error = np.abs(exact(draft.logits) - want.logits).max(initial=0.0)
    taken = draft.tokens.numpy()
    for r, i in np.argwhere(taken != want.tokens):
        row = want.logits[r, i]
        ids = [Oracle(case.config, case.weights).target_id(v) for v in range(len(row))]
        margin = row.max() - row[ids.index(taken[r, i])]
        assert margin < 2 * error, (r, i, margin, error)


def check_step(geometry):
    """fp32: hidden, logits, confidence and tokens."""
    case = batch(geometry)
    hidden, draft = run(case)
    want = wanted(case, draft)
    assert hidden.shape == want.hidden.shape
    assert draft.tokens.dtype == torch.int64
    error = relative_error(hidden, torch.from_numpy(want.hidden))
    assert error <= STEP_FP32
    error = relative_error(draft.logits, torch.from_numpy(want.logits))
    assert error <= STEP_FP32
    check_tokens(case, draft, want)
    assert (draft.confidence is None) == (want.confidence is None)
    if want.confidence is not None:
        error = relative_error(draft.confidence, torch.from_numpy(want.confidence))
        assert error <= STEP_FP32


def check_ties():
    """Ids 2i and 2i + 1 score the same in every row: the lower one is drafted."""
    plain = batch(Geometry(context=(9, 3)))
    case = batch(Geometry(context=(9, 3)), weights=with_ties(plain.weights))
    _, draft = run(case)
    assert torch.equal(draft.logits[..., 0:60:2], draft.logits[..., 1:60:2])
    assert not (draft.tokens % 2).any()
    assert bool((draft.tokens != draft.tokens[0, 0]).any())


@pytest.mark.parametrize("key", GEOMETRIES)
def test_fp32_step_is_the_oracles(key):
    check_step(GEOMETRIES[key])


@pytest.mark.parametrize("key", GEOMETRIES)
def test_bf16_step_is_within_its_bounds(key):
    case = batch(GEOMETRIES[key], torch.bfloat16)
    hidden, draft = run(case, "stock")
    want = wanted(case, draft)
    assert hidden.dtype == torch.bfloat16
    error = norm_error(hidden, torch.from_numpy(want.hidden))
    assert error <= STEP_BF16
    check_tokens(case, draft, want)


def test_fp8_cache_with_a_fitting_scale():
    """Others lost a third of their accepted length to a scale of 1; with the largest
    latent at 448 the step keeps its direction."""
    case = batch(Geometry(context=RAGGED, layers=2))
    step(case.model, case.buffers, "fp32")
    layers = case.buffers.cache.layers
    scales = tuple(float(x[x.isfinite()].abs().max()) / 448 for x in layers)
    empty = tuple(torch.full_like(x, float("nan")).to(FP8) for x in layers)
    small = replace(
        case, buffers=replace(case.buffers, cache=LatentCache(empty, scales))
    )
    hidden, draft = run(small, "fp32")
    want = torch.from_numpy(wanted(small, draft).hidden).flatten()
    cosine = torch.cosine_similarity(hidden.double().flatten(), want, dim=0)
    assert float(cosine) > 0.999
    check_tokens(small, draft, wanted(small, draft))


@pytest.mark.parametrize("seed", range(1, 9))
def test_other_weights(seed):
    kinds = ("vanilla", "gated", "rnn", None)
    check_step(
        Geometry(
            heads=2 + seed,
            layers=1 + seed % 3,
            causal=seed % 2 == 0,
            markov=kinds[seed % 4],
            context=RAGGED[: 1 + seed % 5],
            confidence="hidden",
            seed=seed,
        )
    )


def test_the_lower_id_wins_a_tie():
    check_ties()


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_a_narrower_block_is_a_step_of_that_width(drafts):
    """Fewer rows than trained: a whole block sees fewer rows, so every row changes."""
    wide = Geometry(context=(9, 3), layers=2)
    narrow = replace(wide, rows=drafts)
    check_step(narrow)
    case, full = batch(narrow), batch(wide)
    hidden, _ = run(case)
    other, _ = run(full)
    assert relative_error(hidden, other[:, :drafts]) > 1e-3


def test_causal_and_whole_blocks_differ():
    """19 to 49 % of the hidden state on random models of the real size."""
    whole = Geometry(context=(9, 3), layers=2)
    one, _ = run(batch(whole))
    other, _ = run(batch(replace(whole, causal=True)))
    assert norm_error(one, other) > 0.05


def test_a_request_does_not_depend_on_its_company():
    many = batch(Geometry(context=RAGGED, layers=2))
    hidden, draft = run(many)
    want = Oracle(many.config, many.weights)
    for r, request in enumerate(many.requests):
        alone = want.step([request], draft.tokens[r : r + 1].tolist())
        error = relative_error(hidden[r : r + 1], torch.from_numpy(alone.hidden))
        assert error <= STEP_FP32
