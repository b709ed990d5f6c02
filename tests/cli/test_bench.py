# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap bench generate: three ways in one run, what is summed up, how it is told."""

import json

import pytest

from sparkgap.bench.generate import (
    TIE,
    Difference,
    Row,
    Run,
    Settings,
    Spread,
    Summary,
    first_difference,
    held_out,
)
from sparkgap.bench.prompts import HELD_OUT


def bench(run, tiny, *more):
    options = ("--prompts", 3, "--max-new-tokens", 12)
    return run("bench", "generate", *tiny.options, *options, *more)


def test_json_rows_and_provenance(run, tiny, tmp_path):
    file = tmp_path / "rows.json"
    result = bench(run, tiny, "--json", "--out", file)
    assert result.code == 0
    found = result.json
    assert json.loads(file.read_text("utf-8")) == found
    assert set(found) == {
        "provenance",
        "target",
        "draft",
        "draft_sha256",
        "dtype",
        "settings",
        "summary",
        "rows",
    }
    assert {"argv", "commit", "dirty", "torch", "cpu", "threads"} <= set(
        found["provenance"]
    )
    assert [row["kind"] for row in found["rows"]] == list(HELD_OUT)[:3]
    for row in found["rows"]:
        assert row["plain"]["tokens"] == row["speculative"]["tokens"]
        assert row["transformers_identical"]
        assert row["speed_ratio"] > 0
    assert found["summary"]["identical"] == 3
    assert found["summary"]["differing"] == 0


def test_words(run, tiny):
    said = bench(run, tiny).out
    assert "3 of 3 texts identical to plain decoding" in said
    for text in ("accepted length", "plain / transformers", "quartiles"):
        assert text in said


def test_draws_are_not_expected_to_be_identical(run, tiny):
    result = bench(run, tiny, "--temperature", 1)
    assert result.code == 0
    assert "not compared" in result.out


def test_bfloat16_is_judged_in_fp32(run, tiny):
    assert bench(run, tiny, "--dtype", "bfloat16").code == 0


def row(kind="facts", ours=(1, 2, 3), plain=(1, 2, 3), difference=None, rounds=2):
    return Row(
        kind,
        "prompt",
        plain=Run(plain, 2.0),
        speculative=Run(ours, 1.0),
        transformers=Run(plain, 4.0),
        rounds=rounds,
        round_tokens=6,
        acceptance_by_position=(0.5,),
        difference=difference,
        transformers_identical=True,
    )


def test_summary_pools_rounds_and_counts_ties():
    tie = Difference(1, 4, 2, TIE)
    wrong = Difference(1, 4, 2, 0.5)
    rows = [
        row(),
        row("story", ours=(1, 4, 3), difference=tie, rounds=4),
        row("story", ours=(1, 4, 3), difference=wrong),
    ]
    summary = Summary.of(rows, greedy=True)
    assert (summary.prompts, summary.identical) == (3, 1)
    assert (summary.differing, summary.ties) == (2, 1)
    assert summary.accepted_length == 18 / 8
    assert summary.accepted_length_by_kind == {"facts": 3.0, "story": 2.0}
    assert summary.speculative_to_plain.median == 2.0
    assert summary.plain_to_transformers.median == 2.0
    assert summary.speeds["plain"].median == 1.5


@pytest.mark.parametrize(
    ("margin", "tie"), [(0.0, True), (-TIE, True), (2 * TIE, False), (None, False)]
)
def test_ties(margin, tie):
    assert Difference(0, 1, 2, margin).is_tie == tie


def test_a_difference_that_is_no_tie_is_exit_code_1(run, tiny, monkeypatch):
    from sparkgap.bench import generate as module

    def spoiled(*_row):
        return row(ours=(1, 4), difference=Difference(1, 4, 2, 0.5))

    monkeypatch.setattr(module.Bench, "row", spoiled)
    result = bench(run, tiny)
    assert result.code == 1
    assert "5.0e-01 apart in fp32 logits" in result.out


def test_the_first_difference_is_found_and_judged(tiny):
    from sparkgap.speculate.target import Target

    target = Target.from_pretrained(tiny.target)
    prompt = [10, 20, 30]
    assert first_difference(target, prompt, [1, 2], [1, 2]) is None
    shorter = first_difference(target, prompt, [1], [1, 2])
    assert (shorter.step, shorter.ours, shorter.plain) == (1, None, 2)
    assert shorter.margin is None
    found = first_difference(target, prompt, [1, 5, 9], [1, 6, 9])
    logits, _ = target.open().forward([*prompt, 1], 1)
    assert found.step == 1
    assert found.margin == pytest.approx(float(logits[0, 6] - logits[0, 5]))


def test_spread():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)


def test_prompts_come_kind_by_kind():
    assert [kind for kind, _ in held_out(9)] == [*HELD_OUT, next(iter(HELD_OUT))]
    assert len(held_out()) == len({p for _, p in held_out()}) == 48


def test_settings_know_greedy():
    assert Settings().greedy
    assert not Settings(temperature=0.3).greedy
