# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The loop over a toy target, and a drafter that checks each context row it gets."""

import pytest
import torch

from sparkgap.errors import InputError
from sparkgap.speculate.generate import Round, Statistics, decode_plain, generate
from sparkgap.speculate.verify import probabilities
from speculate.chi_square import p_value
from speculate.toys import ToyDrafter, ToyTarget, table

TABLE = table(11, seed=1)
DRAFTERS = {
    "perfect": lambda: ToyDrafter(TABLE),
    "garbage": lambda: ToyDrafter(table(11, seed=2)),
    "half right": lambda: ToyDrafter(TABLE, spoil=lambda position: position % 2),
    "wide": lambda: ToyDrafter(TABLE, k=7, spoil=lambda position: position % 5 == 0),
    "single": lambda: ToyDrafter(TABLE, k=1, spoil=lambda position: position % 3 == 0),
}


@pytest.fixture(autouse=True)
def _one_thread():
    # Tensors of three numbers: a second thread only waits, 20 times as long when the
    # machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(drafter, prompt, target=None, **options):
    target = target or ToyTarget(TABLE)
    rounds = list(generate(target, drafter, prompt, **options))
    plain = {key: value for key, value in options.items() if key != "method"}
    return rounds, list(decode_plain(target, prompt, **plain))


def tokens(rounds):
    return [token for done in rounds for token in done.tokens]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5]], ids=len)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_greedy_text_is_that_of_plain_decoding(kind, prompt, count):
    rounds, plain = run(DRAFTERS[kind](), prompt, max_new_tokens=count)
    assert tokens(rounds) == plain
    assert len(plain) == count


def test_how_many_drafts_are_kept():
    rounds, _ = run(DRAFTERS["perfect"](), [3, 4], max_new_tokens=11)
    assert [(len(r.tokens), r.accepted, r.drafted) for r in rounds] == [
        (1, 0, 0),
        (5, 4, 4),
        (5, 4, 4),
    ]


def test_the_first_token_comes_before_anything_is_drafted():
    target, drafter = ToyTarget(TABLE), DRAFTERS["perfect"]()
    first = next(iter(generate(target, drafter, [3, 4], max_new_tokens=5)))
    assert first.accepted == first.drafted == 0
    assert target.passes == [2]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_ends_with_the_first_eos(kind, temperature):
    options = {"max_new_tokens": 40, "temperature": temperature}
    rounds, _ = run(DRAFTERS[kind](), [3, 4], **options)
    free = tokens(rounds)
    for eos in set(free):
        rounds, _ = run(DRAFTERS[kind](), [3, 4], eos_ids=(eos,), **options)
        assert tokens(rounds) == free[: free.index(eos) + 1]
        assert all(0 <= r.accepted <= len(r.tokens) for r in rounds)


@pytest.mark.parametrize("length", range(3, 12))
@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_the_text_ends_at_the_model_length(length, whose):
    target = ToyTarget(TABLE, max_length=length if whose == "target" else 64)
    drafter = DRAFTERS["half right"]()
    drafter.max_model_len = length if whose == "drafter" else 64
    rounds, plain = run(drafter, [3, 4, 5], target, max_new_tokens=40)
    assert tokens(rounds) == plain[: length - 3]
    assert len(tokens(rounds)) == length - 3


def test_a_prompt_that_fills_the_length_gives_nothing():
    drafter = DRAFTERS["perfect"]()
    target = ToyTarget(TABLE, max_length=3)
    assert run(drafter, [1, 2, 3], target, max_new_tokens=5) == ([], [])


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "empty"),
        ([1] * 65, {}, "65 tokens"),
        ([1, 99], {}, "span 1 to 99"),
        ([-1], {}, "span -1"),
        ([1], {"max_new_tokens": -3}, "-3"),
        ([1], {"temperature": -0.5}, "-0.5"),
        ([1], {"temperature": float("nan")}, "nan"),
        ([1], {"method": "blok"}, "blok"),
    ],
)
def test_bad_input_is_refused_before_the_first_pass(prompt, options, says):
    target, drafter = ToyTarget(TABLE), DRAFTERS["perfect"]()
    with pytest.raises(InputError, match=says):
        generate(target, drafter, prompt, **{"max_new_tokens": 5} | options)
    assert not target.passes


def test_the_request_is_released_however_it_ends():
    target = ToyTarget(TABLE)
    for take in (1, 2, 100):
        drafter = DRAFTERS["perfect"]()
        rounds = generate(target, drafter, [3], max_new_tokens=9)
        for _, _done in zip(range(take), rounds, strict=False):
            pass
        rounds.close()
        assert len(drafter.released) == 1
        assert not drafter.texts


def test_the_request_is_released_when_drafting_fails():
    drafter = DRAFTERS["perfect"]()
    drafter.propose = lambda *_arguments, **_options: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(generate(ToyTarget(TABLE), drafter, [3], max_new_tokens=9))
    assert len(drafter.released) == 1


@pytest.mark.parametrize("method", ["block", "standard"])
def test_the_same_seed_gives_the_same_text(method):
    def text(seed):
        drafter = ToyDrafter(table(11, seed=3))
        options = {"max_new_tokens": 30, "temperature": 1.0, "method": method}
        return tokens(generate(ToyTarget(TABLE), drafter, [3], seed=seed, **options))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_temperature_next_to_zero_is_greedy():
    rounds, plain = run(
        DRAFTERS["half right"](), [3], max_new_tokens=20, temperature=1e-6
    )
    greedy, _ = run(DRAFTERS["half right"](), [3], max_new_tokens=20)
    assert tokens(rounds) == plain == tokens(greedy)


@pytest.mark.parametrize("method", ["block", "standard"])
@pytest.mark.parametrize("reduced", [False, True])
def test_the_loops_first_three_tokens_are_distributed_as_the_targets(method, reduced):
    logits, trials, temperature = table(3, seed=4), 4000, 1.3
    target = ToyTarget(logits)
    drafter = ToyDrafter(logits + table(3, seed=5, size=1.0), k=2)
    if reduced:
        # Draft tokens 0 and 1 stand for the target's 0 and 2.
        drafter = ToyDrafter(logits[:, :, [0, 2]], k=2, d2t=torch.tensor([0, 1]))
    counts = torch.zeros(3, 3, 3)
    for seed in range(trials):
        a, b, c = tokens(
            generate(
                target,
                drafter,
                [1, 2],
                max_new_tokens=3,
                temperature=temperature,
                seed=seed,
                method=method,
            )
        )
        counts[a, b, c] += 1
    p = probabilities(logits, temperature).double()
    expected = p[1, 2][:, None, None] * p[2][:, :, None] * p * trials
    assert p_value(counts.flatten(), expected.flatten()) > 0.001


def test_statistics_count_rounds_and_their_positions():
    statistics = Statistics()
    done = [
        Round((5,), 0, 0),
        Round((1, 2, 3, 4), 3, 3),
        Round((1, 2), 1, 3),
        Round((1,), 0, 3),
        Round((1, 2), 2, 3),  # cut behind its second draft: the third was never decided
    ]
    assert list(statistics.watch(done)) == done
    assert (statistics.rounds, statistics.tokens) == (4, 10)
    assert statistics.accepted_length == 9 / 4
    assert statistics.acceptance_by_position == [3 / 4, 2 / 3, 1.0]
    assert statistics.survival_by_position == [3 / 4, 2 / 4, 1 / 4]
    assert statistics.tokens_per_second > 0


def test_statistics_leave_the_callers_time_out(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    statistics = Statistics()
    for _ in statistics.watch([Round((5,), 0, 0), Round((1, 2, 3), 2, 2)]):
        pass
    assert (statistics.seconds, statistics.seconds_to_first) == (3.0, 2.0)
    assert statistics.tokens_per_second == 4 / 3
    assert statistics.decode_tokens_per_second == 3.0


def test_statistics_of_nothing_are_zeros():
    statistics = Statistics()
    assert list(statistics.watch([])) == []
    assert statistics.accepted_length == 0.0
    assert statistics.acceptance_by_position == []
    assert statistics.decode_tokens_per_second == 0.0
