# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap train and export-target: what they write is what the others load."""

import json

import pytest

SMALL = (
    *("--device", "cpu", "--taps", 2, "--layers", 1, "--heads", 1, "--drafts", 3),
    *("--intermediate", 16, "--markov-rank", 4, "--rows", 4, "--batches", 1),
    *("--length", 80, "--sequences", 2, "--anchors", 4),
)


@pytest.mark.slow
def test_train_writes_a_draft_that_generate_loads(run, tiny, tmp_path):
    out = tmp_path / "mine"
    command = ("train", tiny.target, "--out", out, *SMALL, "--steps", 3, "--json")
    first = run(*command)
    assert first.code == 0, first.err
    assert "poor drafter" in first.err
    assert set(first.json["accepted_length"]) == {"greedy", "temperature 1"}
    assert first.json["steps"] == 3
    again = run(*command)  # stands at its last step: measured and written again
    assert again.json == first.json
    said = run(
        *("generate", "Hi", "--target", tiny.target, "--draft", out),
        *("--max-new-tokens", 12, "--json", "--compare"),
    )
    assert said.code == 0, said.err
    assert said.json["identical"] is True
    assert len(said.json["acceptance_by_position"]) == 3
    other = run(*command, "--steps", 4)
    assert other.code == 2
    assert "step 3" in other.err


def test_export_target_can_be_generated_from(run, tiny, tmp_path):
    out = tmp_path / "exported"
    found = run("export-target", out, "--target", tiny.target, "--json").json
    assert found["folder"] == str(out)
    assert found["bytes"] > 0
    config = json.loads((out / "config.json").read_text())
    assert config["qk_rope_head_dim"] == 64
    options = ["--draft", tiny.draft, "--max-new-tokens", 8]
    ours = run("generate", "Hi", "--target", out, *options)
    assert ours.out == run("generate", "Hi", "--target", tiny.target, *options).out
