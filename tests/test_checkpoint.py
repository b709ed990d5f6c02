# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Checkpoint folders: what is saved is loaded, under every name a tensor has."""

import json
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
from sparkgap.sharding import shard
from sparkgap.weights import (
    canonical_tensors,
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


def all_at_once(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return prefixed("draft_model.model.")(with_ballast(fused(renamed(tensors))))


@pytest.mark.parametrize(
    "spell",
    [
        prefixed("model."),
        prefixed("draft_model."),
        renamed,
        fused,
        with_ballast,
        all_at_once,
    ],
    ids=["model.", "draft_model.", "fc", "fused", "ballast", "all"],
)
def test_every_spelling_is_read(
    tmp_path: Path, spell: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    c = config()
    want = bare(c)
    equal(write(tmp_path, spell(want)), c, want)


@pytest.mark.parametrize("part", ["mlp.gate_up_proj", "self_attn.fused_qkv_a_proj"])
def test_a_fused_tensor_of_wrong_size_is_told(tmp_path: Path, part: str) -> None:
    c = config()
    tensors = fused(bare(c))
    name = f"layers.1.{part}.weight"
    rows = len(tensors[name])
    tensors[name] = tensors[name][:-1].contiguous()
    write(tmp_path, tensors)
    with pytest.raises(WeightsError) as caught:
        load_weights(tmp_path, c)
    assert f"{name} is [{rows - 1}, 32], wanted {rows} rows" in str(caught.value)
    tensors[name] = torch.zeros(rows, 31)
    with pytest.raises(WeightsError, match=r"gate_proj.*\[48, 31\]|q_a.*\[16, 31\]"):
        load_weights(write(tmp_path, tensors), c)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "d2t"])
def test_tensors_that_may_be_there_are_checked_too(tmp_path: Path, name: str) -> None:
    c = config(draft_vocab_size=90)
    kind = torch.int64 if name == "d2t" else torch.float32
    write(tmp_path, bare(c) | {name: torch.zeros(7, 2, dtype=kind)})
    with pytest.raises(WeightsError, match=rf"{name} is \[7, 2\], wanted"):
        check_weights(tmp_path, c)


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


def test_d2t_must_lead_into_the_vocabulary(tmp_path: Path) -> None:
    c = config(draft_vocab_size=90)
    tensors = bare(c)
    good = tensors["d2t"].clone()
    tensors["d2t"] = good.clone()
    tensors["d2t"][89] = 10**6
    with pytest.raises(WeightsError, match="d2t maps draft ids to target ids"):
        load_weights(write(tmp_path, tensors), c)
    tensors["d2t"] = good.clone()
    tensors["d2t"][0] = -1
    with pytest.raises(WeightsError, match=r"ids -1 to \d+, wanted 0 to 263"):
        load_weights(write(tmp_path, tensors), c)
    tensors["d2t"] = good.clone()
    tensors["d2t"][1] = tensors["d2t"][0] - 1
    with pytest.raises(WeightsError, match="two draft ids to one"):
        load_weights(write(tmp_path, tensors), c)


def test_d2t_of_32_bits_is_read(tmp_path: Path) -> None:
    c = config(draft_vocab_size=90)
    tensors = bare(c)
    d2t = tensors["d2t"]
    got = load_weights(write(tmp_path, tensors | {"d2t": d2t.int()}), c).d2t
    assert got is not None
    assert got.dtype == torch.int64
    assert torch.equal(got, d2t)


def test_d2t_must_hold_whole_numbers(tmp_path: Path) -> None:
    c = config(draft_vocab_size=90)
    tensors = bare(c)
    write(tmp_path, tensors | {"d2t": tensors["d2t"].float()})
    with pytest.raises(WeightsError, match="d2t is stored as F32, wanted I64 or I32"):
        check_weights(tmp_path, c)


def test_one_tensor_may_be_embedding_and_lm_head(tmp_path: Path) -> None:
    c = config()
    weights = random_weights(c)
    tied = replace(weights, lm_head=weights.embedding)
    save_checkpoint(tmp_path, c, tied)
    equal(tmp_path, c, canonical_tensors(tied))


def test_saving_over_a_sharded_checkpoint_replaces_it(tmp_path: Path) -> None:
    """Its index would otherwise be read, and the old weights with it."""
    c = config()
    placed = shards(tmp_path, bare(c))
    new = random_weights(c, seed=1)
    save_checkpoint(tmp_path, c, new)
    equal(tmp_path, c, canonical_tensors(new))
    assert not {path.name for path in tmp_path.iterdir()} & set(placed.values())


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    c = config()
    for seed in (0, 1):
        save_checkpoint(tmp_path / "new" / "folder", c, random_weights(c, seed=seed))
    folder = tmp_path / "new" / "folder"
    equal(folder, c, canonical_tensors(random_weights(c, seed=1)))
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_a_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config()
    save_checkpoint(tmp_path, c, random_weights(c))
    want = canonical_tensors(load_weights(tmp_path, c))
    before = (tmp_path / "model.safetensors").read_bytes()

    def crash(_tensors: object, path: Path, **_options: object) -> None:
        path.write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, c, random_weights(c, seed=1))
    assert (tmp_path / "model.safetensors").read_bytes() == before
    equal(tmp_path, c, want)


def test_a_checkpoint_is_readable_by_others(tmp_path: Path) -> None:
    c = config()
    save_checkpoint(tmp_path, c, random_weights(c))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).stat().st_mode & 0o044 == 0o044


@pytest.mark.parametrize(
    ("row", "target", "is_served"),
    [(0, -1, False), (0, 0, True), (89, 263, True), (89, 264, False)],
    ids=str,
)
def test_d2t_reaches_the_vocabularys_ends_and_no_further(
    tmp_path: Path, row: int, target: int, is_served: bool
) -> None:
    c = config(draft_vocab_size=90)
    tensors = bare(c)
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][row] = target - row
    write(tmp_path, tensors)
    if is_served:
        assert load_weights(tmp_path, c).d2t is not None
    else:
        with pytest.raises(WeightsError, match="wanted 0 to 263; d2t holds offsets"):
            load_weights(tmp_path, c)


def test_offsets_stay_whole_numbers_whatever_the_dtype(tmp_path: Path) -> None:
    """bf16 has 8 bits: offsets above 256 would be rounded."""
    c = config(vocab_size=4001, draft_vocab_size=1000)
    weights = random_weights(c)
    save_checkpoint(tmp_path, c, weights)
    loaded = load_weights(tmp_path, c, dtype=torch.bfloat16)
    assert loaded.final_norm.dtype == torch.bfloat16
    assert loaded.d2t is not None
    assert weights.d2t is not None
    assert torch.equal(loaded.d2t, weights.d2t)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_of_another_config_are_not_saved(tmp_path: Path) -> None:
    c = config()
    weights = random_weights(c)
    shards(tmp_path, bare(c))
    before = content(tmp_path)
    wrong = {
        "context_proj.weight is [16, 64], wanted [32, 64]": shard(weights, c, 0, 2),
        "markov_w1.weight [264, 4] is missing": replace(weights, markov=None),
        "fc_norm.0.weight [32] is extra": random_weights(config(fc_norm=True)),
    }
    for told, unfit in wrong.items():
        with pytest.raises(WeightsError, match="nothing was written") as caught:
            save_checkpoint(tmp_path, c, unfit)
        assert told in str(caught.value)
        assert content(tmp_path) == before


def test_without_an_index_other_files_are_left_alone(tmp_path: Path) -> None:
    c = config()
    other = tmp_path / "model-00001-of-00002.safetensors"
    other.write_bytes(b"somebody's")
    save_checkpoint(tmp_path, c, random_weights(c))
    assert other.read_bytes() == b"somebody's"


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("fails", ["save_file", "json.dumps"])
def test_a_failure_leaves_the_old_files_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool, fails: str
) -> None:
    """Else the new weights would run under the old config, with no error to see."""
    old, new = config(), config(rms_norm_eps=1e-3)
    save_checkpoint(tmp_path, old, random_weights(old))
    if sharded:
        (tmp_path / "model.safetensors").unlink()
        shards(tmp_path, bare(old))
    before = content(tmp_path)

    def full(*args: object, **_options: object) -> str:
        if fails == "save_file":
            Path(str(args[1])).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(f"sparkgap.checkpoint.{fails}", full)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, new, random_weights(new, seed=1))
    assert content(tmp_path) == before
