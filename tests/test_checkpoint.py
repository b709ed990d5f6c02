# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Checkpoint folders: every name a tensor has, every way a file is broken."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgap import checkpoint, safetensors_file
from sparkgap.checkpoint import (
    WeightsError,
    check_weights,
    load_weights,
    save_checkpoint,
)
from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.weights import (
    canonical_tensors,
    expected_tensors,
    optional_tensors,
    random_weights,
)
from tiny import draft_config

DRAFTS: dict[str, dict[str, object]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "fc_norm": {"fc_norm": True},
    "reduced vocabulary": {"draft_vocab_size": 90},
    "causal": {"is_causal": True},
}


def config(**changes: object) -> DraftConfig:
    return DraftConfig.from_dict(draft_config(**changes), name="tiny")


def bare(c: DraftConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights = random_weights(c, dtype=dtype)
    named = canonical_tensors(replace(weights, embedding=None, lm_head=None))
    return {name: tensor.contiguous() for name, tensor in named.items()}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def equal(folder: Path, c: DraftConfig, want: dict[str, Tensor]) -> None:
    got = canonical_tensors(load_weights(folder, c))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("tables", [False, True], ids=["bare", "with tables"])
def test_what_is_saved_is_loaded(
    tmp_path: Path, change: dict[str, object], dtype: torch.dtype, tables: bool
) -> None:
    c = config(**change)
    weights = random_weights(c, dtype=dtype)
    if not tables:
        weights = replace(weights, embedding=None, lm_head=None)
    save_checkpoint(tmp_path, c, weights)
    assert DraftConfig.from_pretrained(tmp_path) == replace(c, name=tmp_path.name)
    equal(tmp_path, c, canonical_tensors(weights))
    wide = load_weights(tmp_path, c, dtype=torch.float64)
    assert wide.layers[1].down.dtype == torch.float64


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {prefix + name: t for name, t in tensors.items()}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "context_proj.weight": "fc.weight",
        "context_norm.weight": "hidden_norm.weight",
        "final_norm.weight": "norm.weight",
    }
    return {names.get(name, name): t for name, t in tensors.items()}


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = dict(tensors)
    for i in range(2):
        mlp, attn = f"layers.{i}.mlp.", f"layers.{i}.self_attn."
        halves = [out.pop(f"{mlp}{half}_proj.weight") for half in ("gate", "up")]
        out[f"{mlp}gate_up_proj.weight"] = torch.cat(halves)
        parts = [
            out.pop(f"{attn}{n}.weight") for n in ("q_a_proj", "kv_a_proj_with_mqa")
        ]
        out[f"{attn}fused_qkv_a_proj.weight"] = torch.cat(parts)
    return out


def with_ballast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    spare = {
        "t2d": torch.ones(3),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    return tensors | spare


@pytest.mark.parametrize(
    "spell",
    [prefixed("model."), prefixed("draft_model."), renamed, fused, with_ballast],
    ids=["model.", "draft_model.", "fc", "fused", "ballast"],
)
def test_every_spelling_is_read(
    tmp_path: Path, spell: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    c = config()
    want = bare(c)
    equal(write(tmp_path, spell(want)), c, want)


def shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Tensors in two files, by turns; returns the index's weight_map."""
    placed = {
        name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(placed.values()):
        part = {n: t for n, t in tensors.items() if placed[n] == file}
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return placed


def test_a_sharded_checkpoint_is_the_whole(tmp_path: Path) -> None:
    c = config()
    want = bare(c)
    shards(tmp_path, want)
    equal(tmp_path, c, want)


def test_all_that_is_wrong_is_in_one_error(tmp_path: Path) -> None:
    c = config()
    tensors = bare(c)
    del tensors["layers.1.mlp.down_proj.weight"]
    tensors["layers.7.mlp.down_proj.weight"] = torch.zeros(2, 3)
    tensors["context_norm.weight"] = torch.zeros(5)
    tensors["final_norm.weight"] = torch.zeros(32, dtype=torch.int8)
    write(tmp_path, tensors)
    for check in (check_weights, load_weights):
        with pytest.raises(WeightsError) as caught:
            check(tmp_path, c)
        text = str(caught.value)
        assert "layers.1.mlp.down_proj.weight [32, 48] is missing" in text
        assert "layers.7.mlp.down_proj.weight [2, 3] is extra" in text
        assert "context_norm.weight is [5], wanted [32]" in text
        assert "final_norm.weight is stored as I8" in text
        assert "not served yet" in text
        assert "use the files and the config.json of one checkpoint" in text


def test_fp8_weights_are_not_served_yet(tmp_path: Path) -> None:
    c = config()
    tensors = bare(c)
    down = "layers.0.mlp.down_proj.weight"
    tensors[down] = tensors[down].to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match="F8_E4M3.*not served yet"):
        load_weights(write(tmp_path, tensors), c)


def test_a_wrong_shape_is_refused_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config()
    write(tmp_path, bare(c) | {"context_norm.weight": torch.zeros(5)})

    def unread(_tensor: object) -> Tensor:
        raise AssertionError("data was read")

    monkeypatch.setattr(safetensors_file.StoredTensor, "read", unread)
    with pytest.raises(WeightsError):
        load_weights(tmp_path, c)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    c = config()
    tensors = bare(c)
    write(tmp_path, tensors | {"model.norm.weight": torch.ones(32)})
    with pytest.raises(WeightsError, match=r"final_norm.weight is there twice"):
        load_weights(tmp_path, c)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    c = config()
    tensors = bare(c)
    shards(tmp_path, tensors)
    second = load_file(tmp_path / "model-2-of-2.safetensors")
    save_file(
        second | {"context_proj.weight": tensors["context_proj.weight"]},
        tmp_path / "model-2-of-2.safetensors",
    )
    with pytest.raises(WeightsError, match="model-1-of-2.*model-2-of-2"):
        load_weights(tmp_path, c)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names ../model"),
        ('{"weight_map": {"nowhere": "model.safetensors"}}', "places nowhere"),
    ],
)
def test_broken_indexes_are_told(tmp_path: Path, index: str, message: str) -> None:
    c = config()
    write(tmp_path, bare(c))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match=message):
        load_weights(tmp_path, c)


def test_absent_files_are_told(tmp_path: Path) -> None:
    c = config()
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        load_weights(tmp_path, c)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"pickle.*convert it to safetensors"):
        load_weights(tmp_path, c)


def good_file(folder: Path) -> bytes:
    return (write(folder, bare(config())) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.9, -1])
def test_truncated_files_are_told(tmp_path: Path, keep: float) -> None:
    whole = good_file(tmp_path)
    size = int(keep * len(whole)) if 0 < keep < 1 else int(keep) % len(whole)
    (tmp_path / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(InputError, match=rf"truncated.*{size:,} bytes.*again"):
        load_weights(tmp_path, config())


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**60) + b"{}",
        header("[]"),
        header("{]"),
        header('{"a": 1}'),
        header('{"a": {"dtype": "F32", "shape": [1]}}'),
        header('{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', b"1234"),
        header('{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}'),
        b"\xff" * 64,
        b"not a safetensors file at all, but text of some length",
    ],
)
def test_corrupt_files_are_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"truncated or no safetensors file.*again"):
        load_weights(tmp_path, config())


def test_one_byte_too_many_is_told(tmp_path: Path) -> None:
    whole = good_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole + b"x")
    with pytest.raises(InputError, match="its header promises"):
        load_weights(tmp_path, config())


def test_offsets_that_lie_are_told(tmp_path: Path) -> None:
    """The sizes add up, but a tensor's bytes are not its shape's."""
    c = config()
    whole = good_file(tmp_path)
    length = struct.unpack("<Q", whole[:8])[0]
    fields = json.loads(whole[8 : 8 + length])
    fields["context_norm.weight"]["data_offsets"][0] += 4
    text = json.dumps(fields)
    content = header(text, whole[8 + length :])
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="cannot read"):
        load_weights(tmp_path, c)


def test_d2t_must_lead_into_the_vocabulary(tmp_path: Path) -> None:
    c = config(draft_vocab_size=90)
    tensors = bare(c)
    good = tensors["d2t"].clone()
    tensors["d2t"] = good.clone()
    tensors["d2t"][89] = 10**6
    with pytest.raises(WeightsError, match="d2t maps draft ids to target ids"):
        load_weights(write(tmp_path, tensors), c)
    tensors["d2t"] = good.clone()
    tensors["d2t"][1] = tensors["d2t"][0] - 1
    with pytest.raises(WeightsError, match="two draft ids to one"):
        load_weights(write(tmp_path, tensors), c)


def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config()
    save_checkpoint(tmp_path, c, random_weights(c))
    before = (tmp_path / "model.safetensors").read_bytes()

    def crash(_tensors: object, path: Path, **_options: object) -> None:
        path.write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, c, random_weights(c, seed=1))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_checkpoint_is_readable_by_others(tmp_path: Path) -> None:
    c = config()
    save_checkpoint(tmp_path, c, random_weights(c))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize("change", DRAFTS.values(), ids=DRAFTS)
def test_random_weights_are_all_there_and_all_different(
    change: dict[str, object],
) -> None:
    c = config(**change)
    named = canonical_tensors(random_weights(c))
    shapes = expected_tensors(c) | optional_tensors(c)
    assert {name: tuple(t.shape) for name, t in named.items()} == shapes
    firsts = [float(t.flatten()[0]) for name, t in named.items() if name != "d2t"]
    assert len(set(firsts)) == len(firsts)
    again, other = random_weights(c), random_weights(c, seed=1)
    assert torch.equal(again.context_proj, named["context_proj.weight"])
    assert not torch.equal(other.context_proj, again.context_proj)


@pytest.mark.parametrize("drafts", [1, 2, 90, 131, 132, 263])
def test_random_d2t_is_valid_for_any_size(tmp_path: Path, drafts: int) -> None:
    c = config(draft_vocab_size=drafts)
    save_checkpoint(tmp_path, c, random_weights(c))
    assert load_weights(tmp_path, c).d2t is not None
