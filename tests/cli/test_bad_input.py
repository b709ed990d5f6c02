# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Bad input: exit code 2, one message with the value and the way out, no traceback."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import write_draft, write_target


def refused(result, *said):
    """One message that says all of `said`, and nothing else."""
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.count("sparkgap:") == 1
    for text in said:
        assert text in result.err, result.err


@pytest.fixture
def draft(tiny, tmp_path):
    """A copy of the draft, to be spoiled."""
    return shutil.copytree(tiny.draft, tmp_path / "draft")


def generate(run, tiny, draft, *more):
    return run("generate", "Hi", "--target", tiny.target, "--draft", draft, *more)


def change_config(draft, **changes):
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_truncated_checkpoint(run, tiny, draft):
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(generate(run, tiny, draft), "model.safetensors")


def test_no_safetensors_at_all(run, tiny, draft):
    (draft / "model.safetensors").write_bytes(b"not a checkpoint")
    refused(generate(run, tiny, draft), "model.safetensors")


def test_tensor_of_the_wrong_shape(run, tiny, draft):
    file = draft / "model.safetensors"
    tensors = load_file(file)
    tensors["final_norm.weight"] = torch.ones(33)
    save_file(tensors, file)
    refused(generate(run, tiny, draft), "final_norm.weight", "33", "32")


def test_missing_tensor(run, tiny, draft):
    file = draft / "model.safetensors"
    tensors = load_file(file)
    del tensors["context_proj.weight"]
    save_file(tensors, file)
    refused(generate(run, tiny, draft), "context_proj.weight")


def test_unknown_config_value(run, tiny, draft):
    change_config(draft, markov_head_type="quantum")
    refused(generate(run, tiny, draft), "quantum", "vanilla")


def test_config_that_is_no_json(run, tiny, draft):
    (draft / "config.json").write_text("{")
    refused(generate(run, tiny, draft), "config.json")


def test_wrong_hidden_size_for_the_target(run, tiny, tmp_path):
    wide = write_draft(tmp_path / "wide", hidden_size=64, target_hidden_size=64)
    refused(generate(run, tiny, wide), "hidden size", "64", "32", "sparkgap train")


def test_vocabulary_mismatch(run, tiny, tmp_path):
    other = write_draft(tmp_path / "other", vocab_size=300)
    refused(generate(run, tiny, other), "vocabulary", "300", "264", "sparkgap train")


def test_taps_beyond_the_target(run, tiny, tmp_path):
    deep = write_draft(
        tmp_path / "deep", target_num_hidden_layers=9, target_layer_ids=[1, 7]
    )
    refused(generate(run, tiny, deep), "layer count", "9", "4")


@pytest.mark.parametrize("k", [0, 5, -1])
def test_k_outside_the_block(run, tiny, k):
    refused(generate(run, tiny, tiny.draft, "--k", k), f"{k} drafts", "1 to 4")


def test_no_draft_there(run, tiny, tmp_path):
    refused(generate(run, tiny, tmp_path / "nothing"), "nothing")


def test_no_target_there(run, tiny, tmp_path):
    result = run("generate", "Hi", "--target", tmp_path / "none", "--draft", tiny.draft)
    refused(result, "none", "default")


def test_target_without_a_tokenizer(run, tiny, tmp_path):
    bare = shutil.copytree(tiny.target, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    refused(generate(run, replace_target(tiny, bare), tiny.draft), "bare")


def replace_target(tiny, folder):
    return type(tiny)(folder, tiny.draft)


def test_shipped_draft_not_installed(run, tiny, monkeypatch):
    monkeypatch.setattr("sparkgap.cli.loading.DEMO_PACKAGE", "sparkgap_no_such")
    result = run("generate", "Hi", "--target", tiny.target)
    refused(result, "not installed", "pip install", "--draft")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "inf"], "--temperature is inf"),
        (["--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", str(2**63)], f"--seed is {2**63}"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_numbers_out_of_range(run, tiny, options, said):
    refused(generate(run, tiny, tiny.draft, *options), said, "wanted")


def test_all_numbers_in_one_message(run, tiny):
    result = generate(
        run, tiny, tiny.draft, "--temperature", "nan", "--max-new-tokens", "-3"
    )
    refused(result, "nan", "-3")


def test_prompt_longer_than_the_target(run, tiny):
    result = run("generate", "x" * 600, *tiny.options)
    refused(result, "619 tokens", "512")


def test_raw_and_empty(run, tiny):
    refused(run("generate", "", "--raw", *tiny.options), "empty")


def test_no_chat_template(run, tiny, tmp_path):
    target = write_target(tmp_path / "plain")
    for file in target.iterdir():
        if file.suffix == ".jinja":
            file.unlink()
        elif file.name == "tokenizer_config.json":
            kept = json.loads(file.read_text())
            kept.pop("chat_template", None)
            file.write_text(json.dumps(kept))
    refused(generate(run, replace_target(tiny, target), tiny.draft), "--raw")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "x", "--nonsense"],
        ["generate", "x", "--dtype", "int4"],
        ["generate", "x", "--k", "many"],
        ["nonsense"],
        ["train", "default"],
    ],
    ids=" ".join,
)
def test_usage(run, arguments):
    result = run(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err


def test_neither_preset_nor_folder(run):
    for command in (["inspect", "kimi-k9"], ["doctor", "--config", "kimi-k9"]):
        refused(run(*command), "kimi-k9", "kimi-k3.1")


def test_export_into_a_full_folder(run, tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(run("export-target", tmp_path, "--target", tiny.target), str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--markov-rank", "-1", "--rows", "0"], "--markov-rank is -1, --rows is 0"),
        (["--length", "10"], "--length is 10"),
        (["--device", "tpu"], "'tpu'"),
        (["--taps", "9"], "9 taps"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, list) else "",
)
def test_training_that_cannot_be(run, tiny, tmp_path, options, said):
    out = tmp_path / "out"
    result = run("train", tiny.target, "--out", out, "--device", "cpu", *options)
    assert result.code == 2
    assert said in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    "options", [["--prompts", "0"], ["--prompts", "99"], ["--max-new-tokens", "0"]]
)
def test_bench_out_of_range(run, tiny, options):
    refused(run("bench", "generate", *tiny.options, *options), options[1], "wanted")


def test_as_a_process_of_its_own(spawn, tiny):
    result = spawn("generate", "Hi", *tiny.options, "--k", "9")
    refused(result, "9 drafts", "1 to 4")
    assert len(result.err.strip().splitlines()) == 1
