# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap generate: its text, its marks, its JSON, its exit codes."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

KEYS = {
    "text",
    "tokens",
    "rounds",
    "accepted_length",
    "acceptance_by_position",
    "tokens_per_second",
}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def short(run, tiny, *more, **options):
    return run(
        "generate", "Hello", *tiny.options, "--max-new-tokens", 24, *more, **options
    )


def test_json_has_these_keys_and_no_others(run, tiny):
    found = short(run, tiny, "--json").json
    assert set(found) == KEYS
    assert set(found["tokens"][0]) == {"id", "text", "drafted"}
    assert found["text"] == "".join(token["text"] for token in found["tokens"])
    assert len(found["tokens"]) <= 24
    assert 1 <= found["accepted_length"] <= 5
    assert all(0 <= share <= 1 for share in found["acceptance_by_position"])
    assert found["tokens_per_second"] > 0


def test_compare_adds_two_keys_and_is_identical(run, tiny):
    result = short(run, tiny, "--json", "--compare")
    assert result.code == 0
    assert set(result.json) == KEYS | {"identical", "speed_ratio"}
    assert result.json["identical"] is True
    assert result.json["speed_ratio"] > 0


def test_identical_is_not_asked_of_draws(run, tiny):
    found = short(run, tiny, "--json", "--compare", "--temperature", 1).json
    assert found["identical"] is None


def test_text_goes_to_stdout_and_the_rest_to_stderr(run, tiny):
    said = short(run, tiny)
    assert said.out == short(run, tiny, "--json").json["text"] + "\n"
    assert not ANSI.search(said.out)
    for row in ("rounds", "accepted length", "tokens/s"):
        assert row in said.err


def test_compare_is_told_in_words(run, tiny):
    said = short(run, tiny, "--compare")
    assert "identical" in said.err
    assert "times as fast" in said.err


def test_a_difference_beyond_a_tie_is_exit_code_1(run, tiny, monkeypatch):
    from sparkgap.bench import generate as bench

    plain = bench.Difference(3, 5, 6, 0.5)
    monkeypatch.setattr(bench, "first_difference", lambda *_: plain)
    result = short(run, tiny, "--compare")
    assert result.code == 1
    assert "differs from token 4 on" in result.err
    tie = bench.Difference(3, 5, 6, 1e-5)
    monkeypatch.setattr(bench, "first_difference", lambda *_: tie)
    assert short(run, tiny, "--compare").code == 0
    monkeypatch.setattr(bench, "first_difference", lambda *_: plain)
    assert short(run, tiny, "--compare", "--dtype", "bfloat16").code == 0


def test_same_seed_same_text(run, tiny):
    first, again, other = (
        short(run, tiny, "--temperature", 0.8, "--seed", seed).out for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("method", ["standard", "block"])
def test_both_verifications(run, tiny, method):
    found = short(run, tiny, "--json", "--temperature", 1, "--method", method).json
    assert found["rounds"] > 0


def test_fewer_drafts(run, tiny):
    found = short(run, tiny, "--json", "--k", 2).json
    assert len(found["acceptance_by_position"]) == 2
    assert found["text"] == short(run, tiny, "--json").json["text"]


def test_prompt_from_stdin(run, tiny):
    piped = run(
        "generate", "-", *tiny.options, "--max-new-tokens", 24, "--json", input="Hello"
    )
    assert piped.json["text"] == short(run, tiny, "--json").json["text"]


def test_no_tokens_wanted(run, tiny):
    found = short(run, tiny, "--json", "--max-new-tokens", 0, "--compare")
    assert found.code == 0
    assert (found.json["text"], found.json["rounds"]) == ("", 0)


def test_raw_differs_from_chat(run, tiny):
    assert short(run, tiny, "--raw").code == 0
    assert short(run, tiny, "--raw").out != short(run, tiny).out


def test_brackets_enclose_what_was_drafted(run, tiny):
    found = short(run, tiny, "--json").json
    said = short(run, tiny, "--mark", "brackets").out
    assert said.replace("⟨", "").replace("⟩", "") == found["text"] + "\n"
    drafted = any(token["drafted"] and token["text"] for token in found["tokens"])
    assert ("⟨" in said) == drafted


def on_a_terminal(arguments, **environment):
    """What a terminal receives; (exit code, raw bytes as text)."""
    main, follower = pty.openpty()
    code = "from sparkgap.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
        | {"TERM": "xterm-256color"}
        | environment,
    )
    os.close(follower)
    received = b""
    while True:
        try:
            block = os.read(main, 4096)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not block:
            break
        received += block
    os.close(main)
    return process.wait(), received.decode("utf-8", "replace")


@pytest.fixture(scope="session")
def same(tmp_path_factory):
    """A pair whose draft is always accepted: a target that repeats one token."""
    import torch
    from safetensors.torch import load_file, save_file

    from tiny import Tiny, write_draft, write_target

    root = tmp_path_factory.mktemp("same")
    target = write_target(root / "target")
    file = target / "model.safetensors"
    tensors = load_file(file)
    head = torch.zeros_like(tensors["lm_head.weight"])
    tensors["lm_head.weight"] = head  # every logit equal: the lowest id wins
    save_file(tensors, file, metadata={"format": "pt"})
    draft = write_draft(root / "draft")
    file = draft / "model.safetensors"
    tensors = load_file(file)
    tensors["markov_head.markov_w2.weight"].zero_()
    save_file(tensors, file)
    return Tiny(target, draft)


@pytest.mark.parametrize(
    ("environment", "code"),
    [({}, "\x1b[32m"), ({"NO_COLOR": "1"}, "\x1b[4m")],
    ids=["colour", "no colour"],
)
def test_drafted_tokens_are_styled_on_a_terminal(same, environment, code):
    exit_code, text = on_a_terminal(
        ["generate", "Hi", *same.options, "--max-new-tokens", 12], **environment
    )
    assert exit_code == 0
    assert code in text
    assert ("\x1b[32m" in text) == (not environment)


def test_an_always_right_draft_is_accepted_whole(run, same):
    found = run("generate", "Hi", *same.options, "--max-new-tokens", 16, "--json").json
    assert found["rounds"] == 3
    assert found["accepted_length"] == 5
    assert found["acceptance_by_position"] == [1, 1, 1, 1]
    assert [token["drafted"] for token in found["tokens"]][:6] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def test_interrupt_is_130_without_a_traceback(run, tiny, monkeypatch):
    from sparkgap.speculate.target import Target

    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Target, "encode", interrupt)
    result = short(run, tiny)
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_defect_keeps_its_traceback(run, tiny, monkeypatch):
    from sparkgap.speculate.target import Target

    monkeypatch.setattr(Target, "encode", lambda *_a, **_k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        short(run, tiny)


def test_as_a_process_of_its_own(spawn, tiny):
    result = spawn("generate", "Hi", *tiny.options, "--max-new-tokens", 8, "--json")
    assert result.code == 0
    assert set(json.loads(result.out)) == KEYS
