# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The sequential stage against an fp64 evaluation of its formulas, and its promises:
who wins, which bits are whose, and that drafts have the distribution they claim.

Weights of `exact_case` are small multiples of 1/8, so that every dot product is exact
in fp32: logits can be asked for bit for bit, and no matmul's order can hide a fault.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from primitives.test_gumbel import murmur
from sparkgap.errors import InputError
from sparkgap.ops.markov_sample import (
    Sampling,
    best_in_shard,
    markov_bias,
    markov_sample,
    merge_shards,
    reference,
)
from sparkgap.verify.tolerance import bound, compare
from sparkgap.weights import MarkovWeights
from speculate.chi_square import p_value

HEADS = (None, "vanilla", "gated", "rnn")
TEMPERATURES = (0.0, 0.3, 1.0, 2.0)
WORD = 0xFFFFFFFF
INF, NAN = math.inf, math.nan
# Scores of fp32 against exact ones: a division, a sum, and noise off by the series'
# 1.7e-6 and a few roundings. A token that leads by more must be the one chosen.
SCORE_ERROR = 1e-5


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    base: Tensor
    anchors: Tensor
    weights: MarkovWeights | None
    sampling: Sampling
    hidden: Tensor
    d2t: Tensor | None = None

    def run(self, **options: Any) -> reference.MarkovDraft:
        return markov_sample(
            self.base,
            self.anchors,
            self.weights,
            self.sampling,
            hidden=self.hidden,
            d2t=self.d2t,
            **options,
        )

    def rows(self, chosen: Tensor) -> "Case":
        """The case of these requests only, in this order."""
        s = self.sampling
        picked = (s.temperatures[chosen], s.seeds[chosen], s.positions[chosen])
        return replace(
            self,
            base=self.base[chosen],
            anchors=self.anchors[chosen],
            hidden=self.hidden[chosen],
            sampling=Sampling(*picked),
        )

    def at(self, temperature: float) -> "Case":
        temperatures = torch.full_like(self.sampling.temperatures, temperature)
        return replace(self, sampling=replace(self.sampling, temperatures=temperatures))


def heads(kind, vocab, draft_vocab, rank, width, make) -> MarkovWeights | None:
    if kind is None:
        return None
    gated, rnn = kind == "gated", kind == "rnn"
    return MarkovWeights(
        w1=make(vocab, rank),
        w2=make(draft_vocab, rank),
        gate_w=make(rank, width + rank) if gated else None,
        gate_b=make(rank) if gated else None,
        joint_w=make(3 * rank, 2 * rank + width) if rnn else None,
        joint_b=make(3 * rank) if rnn else None,
    )


def a_case(
    make, kind="vanilla", requests=5, steps=4, vocab=37, rank=5, width=6, d2t=None
) -> Case:
    """Requests of mixed temperatures; `make(*shape)` fills logits, weights, hidden."""
    draft_vocab = vocab if d2t is None else len(d2t)
    generator = torch.Generator().manual_seed(99)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,), generator=generator)
    first = torch.randint(1, 2**20, (requests, 1), generator=generator)
    anchors = torch.randint(0, vocab, (requests,), generator=generator)
    anchors[-1:] = vocab - 1
    mixed = torch.tensor((0.3, 1.0, 0.0, 2.0, 0.7)).repeat(requests // 5 + 1)[:requests]
    return Case(
        base=make(requests, steps, draft_vocab),
        anchors=anchors,
        weights=heads(kind, vocab, draft_vocab, rank, width, make),
        sampling=Sampling(mixed, seeds, first + torch.arange(steps)),
        hidden=make(requests, steps, width),
        d2t=d2t,
    )


def normal(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def eighths(dtype, seed=0):
    """Multiples of 1/8 within ±1: products and sums of them are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (
        torch.randint(-8, 9, shape, generator=generator).float() / 8
    ).to(dtype)


def exact_case(dtype=torch.float32, seed=0, **sizes) -> Case:
    return a_case(eighths(dtype, seed), "vanilla", **sizes)


# The formulas, in fp64 and one row at a time.


def exact_bias(w, previous: int, h: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    embedded = w.w1[previous].double()
    if w.gate_w is not None:
        inside = w.gate_w.double() @ torch.cat([h, embedded]) + w.gate_b.double()
        return w.w2.double() @ (embedded / (1 + torch.exp(-inside))), state
    if w.joint_w is not None:
        inside = w.joint_w.double() @ torch.cat([state, embedded, h])
        gate, candidate, out = (inside + w.joint_b.double()).reshape(3, -1)
        keep = 1 / (1 + torch.exp(-gate))
        state = keep * state + (1 - keep) * torch.tanh(candidate)
        return w.w2.double() @ torch.tanh(out), state
    return w.w2.double() @ embedded, state


def exact_biases(case: Case, tokens: Tensor) -> Tensor:
    """Biases [R, k, Vd] fp64 along the given tokens [R, k]."""
    out = torch.zeros(case.base.shape, dtype=torch.float64)
    for r, row in enumerate(tokens.tolist() if case.weights is not None else []):
        state = torch.zeros(case.weights.w1.shape[1], dtype=torch.float64)
        for i, before in enumerate([int(case.anchors[r]), *row[:-1]]):
            h = case.hidden[r, i].double()
            out[r, i], state = exact_bias(case.weights, before, h, state)
    return out


def exact_gumbel(seed: int, sample_pos: int, step: int, token: int) -> float:
    seed = (seed ^ step << 32) & (2**64 - 1)
    hashed = murmur(seed & WORD, seed >> 32, sample_pos - 1 + 2**30 & WORD, token)
    u = float(torch.tensor((hashed + 0.5) / 2**32, dtype=torch.float64).float())
    return -math.log(-math.log1p(-min(u, 1 - 2.0**-24)))


def exact_choice(case: Case, logits: Tensor, r: int, i: int) -> tuple[int, float]:
    """The token of row (r, i) and by how much its score leads."""
    s, scores = case.sampling, {}
    temperature = float(s.temperatures[r])
    for column, logit in enumerate(logits[r, i].tolist()):
        token = column + (0 if case.d2t is None else int(case.d2t[column]))
        scores[token] = logit
        if temperature:
            key = int(s.seeds[r]), int(s.positions[r, i]), i, token
            scores[token] = logit / temperature + exact_gumbel(*key)
    best = max(scores.values())
    winner = min(token for token, score in scores.items() if score == best)
    others = [score for token, score in scores.items() if token != winner]
    return winner, best - max(others, default=-INF)


def check_choice(case: Case, **options: Any) -> None:
    """Every token is the one that the returned logits and the noise rule demand."""
    drawn = case.run(**options)
    for r, temperature in enumerate(case.sampling.temperatures.tolist()):
        for i in range(case.base.shape[1]):
            token, lead = exact_choice(case, drawn.logits, r, i)
            assert temperature == 0 or lead > SCORE_ERROR, "the case cannot tell"
            assert int(drawn.tokens[r, i]) == token, (r, i)


def check_logits(case: Case, numerics: str) -> None:
    """Returned logits are base plus the exact bias, within the roundings allowed."""
    drawn = case.run(numerics=numerics)
    bias = exact_biases(case, drawn.tokens)
    wanted = case.base.double() + bias
    terms = 0 if case.weights is None else sum(case.weights.w1.shape[1:]) + 12
    largest = float(torch.max(wanted.abs().max(), bias.abs().max()))
    roundings = 0 if case.weights is None else 2  # what W2 multiplies, and the bias
    if numerics == "fp32" and case.base.dtype == torch.float32:
        roundings = 0
    dtype = torch.float32 if numerics == "fp32" else case.base.dtype
    assert drawn.logits.dtype == dtype
    limit = bound(dtype, largest, terms, roundings)
    assert compare(drawn.logits, wanted, limit).problem == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("numerics", ["stock", "fp32"])
def test_logits_and_choice(kind, dtype, numerics):
    case = a_case(normal(dtype), kind)
    check_logits(case, numerics)
    check_choice(case, numerics=numerics)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", HEADS)
def test_choice_at_one_temperature(kind, temperature):
    check_choice(a_case(normal(torch.float32, seed=4), kind).at(temperature))


@pytest.mark.parametrize("vocab", [1, 2, 31, 1025])
def test_any_vocabulary(vocab):
    check_choice(a_case(normal(torch.float32), requests=2, steps=2, vocab=vocab))


def test_rank_one():
    case = a_case(normal(torch.float32), rank=1)
    check_logits(case, "stock")
    check_choice(case)


def test_stock_rounds_bias_and_sum_and_fp32_neither():
    case = exact_case(torch.bfloat16, rank=16, vocab=501, requests=20).at(0.0)
    drawn = case.run(numerics="stock")
    base, bias = case.base, exact_biases(case, drawn.tokens)
    assert drawn.logits.dtype == torch.bfloat16
    assert torch.equal(drawn.logits, base + bias.bfloat16())
    assert not torch.equal(drawn.logits, (base.double() + bias).bfloat16())
    wide = case.run(numerics="fp32")
    assert wide.logits.dtype == torch.float32
    bias = exact_biases(case, wide.tokens)
    assert torch.equal(wide.logits, (base.double() + bias).float())
    assert not torch.equal(wide.tokens, drawn.tokens)


@pytest.mark.parametrize(
    ("of_base", "of_weights"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_weights_of_another_dtype_than_the_logits(of_base, of_weights):
    case = exact_case(of_weights, rank=16, vocab=101)
    case = replace(case, base=case.base.to(of_base))
    drawn = case.run(numerics="stock")
    bias = exact_biases(case, drawn.tokens).to(of_base)
    assert drawn.logits.dtype == of_base
    assert torch.equal(drawn.logits, case.base + bias)


def test_what_w2_multiplies_is_rounded_once_to_its_dtype():
    # A gate that is its bias alone, so that the product's fp32 value is known.
    case = a_case(eighths(torch.bfloat16), "gated", vocab=101)
    weights = replace(case.weights, gate_w=torch.zeros_like(case.weights.gate_w))
    embedded = weights.w1[case.anchors].float()
    product = torch.sigmoid(weights.gate_b.float()) * embedded
    case = replace(case, weights=weights, base=torch.zeros_like(case.base))
    bias = case.run(numerics="stock").logits[:, 0]
    wanted = [p.double() @ weights.w2.double().T for p in (product.bfloat16(), product)]
    assert torch.equal(bias, wanted[0].bfloat16())
    assert not torch.equal(bias, wanted[1].bfloat16())


def test_the_token_before_is_the_one_drafted():
    # W1 as the identity and W2 a permutation: each token names its successor.
    vocab = 11
    follow = (torch.arange(vocab) * 4 + 3) % vocab
    w2 = torch.nn.functional.one_hot(follow, vocab).float().T * 100
    weights = MarkovWeights(torch.eye(vocab), w2, None, None, None, None)
    case = replace(a_case(eighths(torch.float32), vocab=vocab), weights=weights)
    wanted, before = [], case.anchors
    for _ in range(4):
        before = follow[before]
        wanted.append(before)
    assert torch.equal(case.run().tokens, torch.stack(wanted, dim=1))


def test_vllms_own_sampler_draws_the_same_tokens():
    path = Path(__file__).parents[1] / "data/gumbel_golden.json"
    golden = json.loads(path.read_text())["sampled"]
    requests, steps, vocab = 5, 3, 2500
    rows, tokens = torch.arange(requests * steps)[:, None], torch.arange(vocab)
    mixed = (rows * 7919 + tokens * 104729 + rows * tokens) % 33
    base = (mixed.float() / 4 - 4).view(requests, steps, vocab)
    positions = torch.tensor(golden["first_positions"])[:, None] + torch.arange(steps)
    sampling = Sampling(
        torch.tensor(golden["temperatures"]), torch.tensor(golden["seeds"]), positions
    )
    anchors = torch.zeros(requests, dtype=torch.int64)
    drawn = markov_sample(base, anchors, None, sampling)
    assert drawn.tokens.tolist() == golden["tokens"]
    assert torch.equal(drawn.logits, base)


# Ties, infinities and NaN.


def one_row(values, temperature, d2t=None) -> Case:
    vocab = len(values)
    case = exact_case(requests=3, steps=2, vocab=vocab, d2t=d2t).at(temperature)
    base = case.base.clone()
    base[1, 0] = torch.tensor(values)
    return replace(case, base=base, weights=None)


def check_ties() -> None:
    """Equal scores go to the lowest id, also where rounding swallows the noise."""
    for temperature in TEMPERATURES:
        # 2³⁰ and its noise: the noise is less than half an ulp of the sum.
        high = 2.0**30 * (temperature or 1)
        values = [0.0] * 40
        for token in (9, 17, 39):
            values[token] = high
        assert one_row(values, temperature).run().tokens[1, 0] == 9


def test_ties():
    check_ties()


def test_a_tie_to_the_higher_id_is_noticed(monkeypatch):
    def highest(token_ids: Tensor, chosen: Tensor) -> Tensor:
        return torch.where(chosen, token_ids, -1).amax(dim=-1)

    monkeypatch.setattr(reference, "_lowest", highest)
    with pytest.raises(AssertionError):
        check_ties()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    ("values", "token"),
    [
        ([NAN] * 6, 0),
        ([-INF] * 6, 0),
        ([-INF, NAN, -INF, NAN, NAN, -INF], 0),
        ([NAN, -INF, -INF, 2.5, NAN, -INF], 3),
        ([NAN, 1.0, 2.0, -INF, INF, INF], 4),
        ([INF] * 6, 0),
        ([NAN, NAN, NAN, NAN, NAN, -1e37], 5),
    ],
    ids=str,
)
def test_infinities_and_nan(values, token, temperature):
    case = one_row(values, temperature)
    drawn = case.run()
    assert drawn.tokens[1, 0] == token
    wanted = torch.where(case.base.isnan(), -INF, case.base)
    assert torch.equal(drawn.logits, wanted)
    others = torch.tensor([0, 2])
    assert torch.equal(drawn.tokens[others], case.rows(others).run().tokens)
    assert torch.equal(
        drawn.tokens[1, 1:], case.rows(torch.tensor([1])).run().tokens[0, 1:]
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_poisoned_request_harms_no_other(kind, temperature):
    case = a_case(eighths(torch.float32), kind).at(temperature)
    clean = case.run()
    base, hidden = case.base.clone(), case.hidden.clone()
    base[2], hidden[2] = NAN, NAN
    drawn = replace(case, base=base, hidden=hidden).run()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(drawn.tokens[others], clean.tokens[others])
    assert torch.equal(drawn.logits[others], clean.logits[others])
    assert drawn.tokens[2].tolist() == [0] * 4


@pytest.mark.parametrize("temperature", [-1.0, 1e-45, 1e38, INF, NAN])
def test_absurd_temperatures_stay_in_range(temperature):
    case = one_row([INF, -INF, NAN, 0.0, 1.0, -1.0], temperature)
    tokens = case.run().tokens
    assert bool(((tokens >= 0) & (tokens < 6)).all())


# What a draft depends on.


@pytest.mark.parametrize("kind", HEADS)
def test_no_requests(kind):
    case = a_case(normal(torch.float32), kind)
    drawn = case.rows(torch.arange(0)).run()
    assert drawn.tokens.shape == (0, 4)
    assert drawn.tokens.dtype == torch.int64
    assert drawn.logits.shape == (0, 4, 37)


def test_logits_are_optional():
    case = exact_case()
    drawn = case.run(return_logits=False)
    assert drawn.logits is None
    assert torch.equal(drawn.tokens, case.run().tokens)


@pytest.mark.parametrize("numerics", ["stock", "fp32"])
def test_a_request_alone_permuted_or_padded_drafts_the_same(numerics):
    case = exact_case(requests=7, vocab=101)
    whole = case.run(numerics=numerics)
    for row in range(7):
        alone = case.rows(torch.tensor([row])).run(numerics=numerics)
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert torch.equal(alone.logits[0], whole.logits[row])
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    assert torch.equal(
        case.rows(order).run(numerics=numerics).tokens, whole.tokens[order]
    )
    padded = case.rows(torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 6, 0]))
    padded.base[7:] = NAN
    padded.sampling.positions[7:] = 0
    padded.sampling.seeds[7:] = 0
    drawn = padded.run(numerics=numerics)
    assert torch.equal(drawn.tokens[:7], whole.tokens)
    assert torch.equal(drawn.logits[:7], whole.logits)


def test_arguments_are_left_alone():
    case = exact_case()
    inputs = [case.base, case.anchors, case.hidden, *vars(case.sampling).values()]
    before = [tensor.clone() for tensor in inputs]
    case.run()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_d2t_is_the_whole_vocabulary_with_the_rest_at_minus_infinity(temperature):
    vocab = 60
    kept = torch.tensor([0, 2, 3, 11, 12, 13, 30, 41, 58, 59])
    offsets = kept - torch.arange(len(kept))
    case = exact_case(vocab=vocab, d2t=offsets).at(temperature)
    drawn = case.run()
    base = torch.full((*case.base.shape[:2], vocab), -INF)
    base[..., kept] = case.base
    w2 = torch.zeros(vocab, case.weights.w2.shape[1])
    w2[kept] = case.weights.w2
    whole = replace(case, base=base, weights=replace(case.weights, w2=w2), d2t=None)
    wanted = whole.run()
    assert torch.equal(drawn.tokens, wanted.tokens)
    assert torch.equal(drawn.logits, wanted.logits[..., kept])
    assert drawn.tokens.max() > len(kept)
    check_choice(case)


def test_d2t_breaks_ties_by_token():
    # Draft ids 0, 1, 2 are tokens 9, 4, 7; nothing is known: the lowest token.
    offsets = torch.tensor([9, 3, 5])
    for temperature in TEMPERATURES:
        assert one_row([NAN] * 3, temperature, offsets).run().tokens[1, 0] == 4


# Vocabulary shards.


def ragged(vocab, parts, seed):
    """Cuts [parts + 1] of a vocabulary; the first shard has one id, one has none."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(1, vocab + 1, (parts - 1,), generator=generator)
    inner[0] = 1
    inner[-1] = inner[-2] if parts > 2 else 1
    return [0, *sorted(inner.tolist()), vocab]


def draft_in_shards(case: Case, cuts) -> Tensor:
    """The whole loop with W2 and the logits cut by vocabulary."""
    slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    previous, tokens = case.anchors, []
    token_ids = torch.arange(case.base.shape[-1])
    for step in range(case.base.shape[1]):
        found = []
        for part in slices:
            shard = replace(case.weights, w2=case.weights.w2[part])
            bias, _ = markov_bias(shard, previous, None, None)
            logits = case.base[:, step, part] + bias
            found.append(best_in_shard(logits, token_ids[part], case.sampling, step))
        scores, ids = (torch.stack(column) for column in zip(*found, strict=True))
        previous = merge_shards(scores, ids)
        backwards = merge_shards(scores.flip(0), ids.flip(0))
        assert torch.equal(previous, backwards)
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_shards_draft_the_same(parts, seed):
    case = exact_case(seed=seed, vocab=203, requests=6)
    base = case.base.clone()
    base[0, 1], base[1, 1], base[2, 2] = NAN, -INF, 0.5
    base[3, :, 7], base[3, :, 190] = INF, INF
    case = replace(case, base=base)
    drafted = draft_in_shards(case, ragged(203, parts, seed))
    assert torch.equal(drafted, case.run().tokens)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("logit", [2.0**30, -INF, NAN])
def test_ties_across_shards_go_to_the_lowest_id(logit, temperature):
    logits = torch.full((1, 10), logit * (temperature or 1))
    one = torch.zeros(1, dtype=torch.int64)
    sampling = Sampling(torch.tensor([temperature]), one, one[:, None])
    ids = torch.arange(10)
    # No shard holds ids 0 to 2, and one holds none at all.
    cuts = [(6, 10), (3, 6), (6, 6)]
    found = [best_in_shard(logits[:, a:b], ids[a:b], sampling, 0) for a, b in cuts]
    scores, tokens = (torch.stack(column) for column in zip(*found, strict=True))
    assert merge_shards(scores, tokens).tolist() == [3]


# Distribution: counts over many seeds against softmax(logits / temperature).

TRIALS = 100_000
CHANCE = 1e-3  # of a correct sampler failing; trials are fixed, so it passes or not


def joint_counts(tokens: Tensor, vocab: int) -> Tensor:
    return torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab**2)


def repeated(case: Case, temperature: float, positions) -> Case:
    """The first request of a case TRIALS times, under seeds 0, 1, 2, …"""
    many = case.rows(torch.zeros(TRIALS, dtype=torch.int64)).at(temperature)
    positions = torch.tensor(positions).expand(TRIALS, len(positions))
    sampling = replace(many.sampling, seeds=torch.arange(TRIALS), positions=positions)
    return replace(many, sampling=sampling)


@pytest.mark.parametrize("temperature", TEMPERATURES[1:])
def test_drafts_have_the_distribution_of_the_cached_logits(temperature):
    vocab = 6
    case = exact_case(steps=2, vocab=vocab, rank=3, seed=2)
    case = replace(case, base=case.base * 2)
    drawn = repeated(case, temperature, [17, 18]).run()
    first, second = torch.softmax(drawn.logits.double() / temperature, -1).unbind(1)
    wanted = torch.zeros(vocab, vocab, dtype=torch.float64)
    for token in range(vocab):
        follows = drawn.tokens[:, 0] == token
        if follows.any():
            wanted[token] = first[0, token] * second[follows][0]
    counts = joint_counts(drawn.tokens, vocab)
    assert p_value(counts, wanted.flatten() * TRIALS) > CHANCE
    # The test can tell: another temperature's distribution does not fit.
    wrong = torch.softmax(drawn.logits[0, 0].double() / (temperature * 1.1), -1)
    marginal = torch.bincount(drawn.tokens[:, 0], minlength=vocab)
    assert p_value(marginal, first[0] * TRIALS) > CHANCE
    assert p_value(marginal, wrong * TRIALS) < CHANCE


def test_positions_of_one_seed_are_independent_draws():
    case = repeated(exact_case(steps=2, vocab=5), 1.0, [1, 2])
    base = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0]).expand(TRIALS, 2, 5)
    positions = torch.arange(1, TRIALS + 1)[:, None] + torch.arange(2)
    sampling = replace(
        case.sampling, seeds=torch.full((TRIALS,), 7), positions=positions
    )
    tokens = replace(case, base=base, weights=None, sampling=sampling).run().tokens
    shares = torch.softmax(base[0, 0].double(), -1)
    # A position and the next: pairs that do not overlap.
    for pairs in (tokens, torch.stack([tokens[0::2, 0], tokens[1::2, 0]], dim=1)):
        wanted = shares[:, None] * shares * len(pairs)
        assert p_value(joint_counts(pairs, 5), wanted.flatten()) > CHANCE


def check_steps_are_independent() -> None:
    """Two steps that draft for the same position from the same logits."""
    case = repeated(exact_case(steps=2, vocab=5), 1.0, [9, 9])
    base = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0]).expand(TRIALS, 2, 5)
    tokens = replace(case, base=base, weights=None).run().tokens
    shares = torch.softmax(base[0, 0].double(), -1)
    wanted = shares[:, None] * shares * TRIALS
    assert p_value(joint_counts(tokens, 5), wanted.flatten()) > CHANCE


def test_steps_are_independent_draws():
    check_steps_are_independent()


def test_a_forgotten_step_salt_is_noticed(monkeypatch):
    whole = reference.draft_stream
    monkeypatch.setattr(
        reference, "draft_stream", lambda seed, pos, _step: whole(seed, pos, 0)
    )
    with pytest.raises(AssertionError):
        check_steps_are_independent()


# The bias by itself, as training uses it.


@pytest.mark.parametrize("kind", HEADS[1:])
def test_bias_is_differentiable(kind):
    case = a_case(normal(torch.float32), kind, requests=4, steps=3)
    named = {n: t for n, t in vars(case.weights).items() if t is not None}
    leaves = {n: t.clone().requires_grad_() for n, t in named.items()}
    hidden = case.hidden.clone().requires_grad_()
    tokens = torch.tensor([[1, 2, 2], [5, 36, 0], [7, 7, 7], [3, 1, 4]])
    pull = torch.randn(4, 3, 37, generator=torch.Generator().manual_seed(8))

    weights, state, loss = replace(case.weights, **leaves), None, torch.zeros(())
    before = torch.cat([case.anchors[:, None], tokens[:, :-1]], dim=1)
    for step in range(3):
        bias, state = markov_bias(weights, before[:, step], hidden[:, step], state)
        loss = loss + (bias * pull[:, step]).sum()
    got = torch.autograd.grad(loss, [*leaves.values(), hidden], allow_unused=True)

    exact = {n: t.double().requires_grad_() for n, t in named.items()}
    wide = case.hidden.double().requires_grad_()
    copied = replace(
        case, weights=replace(case.weights, **exact), hidden=wide, base=case.base * 0
    )
    wanted = torch.autograd.grad(
        (exact_biases(copied, tokens) * pull).sum(),
        [*exact.values(), wide],
        allow_unused=True,
    )
    for name, a, b in zip([*named, "hidden"], got, wanted, strict=True):
        if kind == "vanilla" and name == "hidden":
            assert a is None
            continue
        limit = bound(torch.float32, float(b.abs().max()), terms=12 * 37)
        assert b.abs().max() > 0
        assert compare(a, b, limit).problem == "", name


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_teacher_forcing_takes_all_rows_at_once(kind):
    case = a_case(eighths(torch.float32), kind)
    rows = case.anchors.repeat_interleave(4)
    together, state = markov_bias(case.weights, rows, case.hidden.flatten(0, 1), None)
    assert state is None
    assert together.shape == (20, 37)
    for step in range(4):
        alone, _ = markov_bias(case.weights, case.anchors, case.hidden[:, step], None)
        assert compare(together.view(5, 4, 37)[:, step], alone, 1e-6).problem == ""


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_read_hidden_states_say_so(kind):
    case = a_case(normal(torch.float32), kind)
    with pytest.raises(InputError, match=f"the {kind} Markov head .* got None; give"):
        markov_sample(case.base, case.anchors, case.weights, case.sampling)
