# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap inspect: the promised figures, words, and what it refuses."""

import json
import shutil

import pytest

from sparkgap.bench.workloads import H200_TB_PER_S
from sparkgap.presets import PRESETS


def test_kimi_k3(run):
    found = run("inspect", "kimi-k3", "--json").json
    assert found["parameters"] == 3_562_312_961
    assert found["tensors"] == 68
    assert found["stored"] is None
    assert found["source"] == PRESETS["kimi-k3"].source
    assert found["cache_bytes_per_token"] == 5760
    assert found["geometry"]["target_layer_ids"] == [2, 23, 47, 71, 89]
    assert found["geometry"]["num_drafts"] == 7


@pytest.mark.parametrize(
    ("preset", "stock", "ours"),
    [("kimi-k3", 2080, 1117), ("kimi-k3.1", 2721, 1244)],
)
def test_eight_ranks(run, preset, stock, ours):
    read = run("inspect", preset, "--tp", 8, "--json").json["bytes_per_step"]
    assert round(read["stock"] / 1e6) == stock
    assert read["sparkgap"] <= ours * 1e6
    assert read["sparkgap_w2_once"] < read["sparkgap"]


def test_stages_add_up(run):
    found = run(
        "inspect", "kimi-k3", "--tp", 8, "--dcp", 4, "--context", 1000, "--json"
    ).json
    for layout in ("stock", "sparkgap", "sparkgap_w2_once"):
        stages = found["stages"]
        assert found["total_bytes_per_step"][layout] == sum(s[layout] for s in stages)
        assert found["bytes_per_step"][layout] == sum(
            s[layout] for s in stages if s["is_weight"]
        )
    cache = next(s for s in found["stages"] if s["name"] == "cache")
    assert cache["sparkgap"] == 250 * 5760


def test_bandwidth_moves_the_floor(run):
    usual, half = (
        run("inspect", "kimi-k3", *options, "--json").json
        for options in ((), ("--bandwidth", H200_TB_PER_S / 2))
    )
    assert usual["step"]["tb_per_s"] == H200_TB_PER_S
    assert half["floor_us"]["stock"] == pytest.approx(2 * usual["floor_us"]["stock"])


@pytest.mark.parametrize("preset", PRESETS)
def test_words(run, preset):
    said = run("inspect", preset)
    assert said.code == 0
    for text in ("MLA", "parameters", "context_proj", "lm_head", "Floor at 4.5 TB/s"):
        assert text in said.out


def test_a_checkpoint(run, tiny):
    found = run("inspect", tiny.draft, "--json").json
    assert found["name"] == "draft"
    assert found["stored"]["files"] == 1
    assert found["stored"]["tensors"] > 0
    assert "stored in 1 file" in run("inspect", tiny.draft).out


def test_a_config_alone_is_enough(run, tiny, tmp_path):
    shutil.copy(tiny.draft / "config.json", tmp_path)
    assert run("inspect", tmp_path, "--json").json["stored"] is None
    assert "no weights" in run("inspect", tmp_path).out


def test_a_truncated_file_is_refused(run, tiny, tmp_path):
    folder = shutil.copytree(tiny.draft, tmp_path / "draft")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    said = run("inspect", folder)
    assert (said.code, said.out) == (2, "")
    assert "model.safetensors is truncated" in said.err


def test_every_problem_of_a_config_is_said(run, tmp_path):
    raw = dict(PRESETS["kimi-k3"].config) | {"hidden_act": "gelu", "block_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    said = run("inspect", tmp_path)
    assert said.code == 2
    assert "hidden_act is 'gelu'" in said.err
    assert "block_size is 0" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kimi-k9",), "kimi-k3"),
        (("kimi-k3", "--tp", 7), "num_attention_heads 64 is not a multiple of 7"),
        (("kimi-k3", "--dcp", 2), "choose a divisor of 1"),
        (("kimi-k3", "--bandwidth", 0), "--bandwidth is 0.0"),
        (("kimi-k3", "--bandwidth", "nan"), "--bandwidth is nan"),
        (("kimi-k3", "--context", -1), "the context is -1"),
        (("kimi-k3", "--requests", 0), "the number of requests is 0"),
    ],
)
def test_refusals(run, arguments, message):
    said = run("inspect", *arguments)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
