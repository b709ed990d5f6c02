# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap inspect: published sizes, its sums, a checkpoint's own tensors."""

import pytest

from sparkgap.bench.workloads import H200_TB_PER_S
from sparkgap.cli.inspect import BANDWIDTH
from sparkgap.presets import PRESETS

MB = 1e6


def test_published_parameter_count(run):
    assert run("inspect", "kimi-k3", "--json").json["parameters"] == 3_562_312_961


@pytest.mark.parametrize(
    ("preset", "tp", "stock", "ours"),
    [
        ("kimi-k3", 1, 7585, 7585),
        ("kimi-k3", 2, 4439, 3889),
        ("kimi-k3", 8, 2080, 1117),
        ("kimi-k3.1", 8, 2721, 1244),
        ("kimi-k3-block5", 8, 1433, 796),
    ],
)
def test_published_bytes(run, preset, tp, stock, ours):
    found = run("inspect", preset, "--tp", tp, "--json").json["bytes_per_step"]
    assert round(found["stock"] / MB) == stock
    assert round(found["sparkgap"] / MB) == ours


def test_sums(run):
    found = run(
        *("inspect", "kimi-k3", "--tp", 8, "--dcp", 2, "--context", 1001),
        *("--requests", 3, "--bandwidth", 3, "--json"),
    ).json
    for layout in ("stock", "sparkgap", "sparkgap_w2_once"):
        stages = found["stages"]
        weights = sum(s[layout] for s in stages if s["is_weight"])
        assert weights == found["bytes_per_step"][layout]
        everything = sum(s[layout] for s in stages)
        assert everything == found["all_bytes_per_step"][layout]
        assert found["floor_us"][layout] == pytest.approx(everything / 3e6)
    (cache,) = (s for s in found["stages"] if s["name"] == "cache")
    assert cache["sparkgap"] == 3 * 501 * found["cache_bytes_per_token"]
    assert found["cache_bytes_per_token"] == 5 * 576 * 2


def test_bandwidth_is_the_measured_one():
    assert BANDWIDTH == H200_TB_PER_S


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_told_in_words(run, preset):
    said = run("inspect", preset)
    assert said.code == 0
    for text in ("parameters", "lm_head", "floor at 4.5 TB/s", "tokens of context"):
        assert text in said.out


def test_a_checkpoint_lists_what_its_files_hold(run, tiny):
    found = run("inspect", tiny.draft, "--json").json
    held = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert held["context_proj.weight"]["shape"] == [32, 64]
    assert held["context_proj.weight"]["dtype"] == "F32"
    assert found["source"] == str(tiny.draft.resolve())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", 7], "64 is not a multiple of 7"),
        (["--tp", 0], "0"),
        (["--tp", 8, "--dcp", 3], "divisor of 8"),
        (["--context", -1], "context is -1"),
        (["--requests", 0], "requests is 0"),
        (["--bandwidth", 0], "--bandwidth is 0.0"),
        (["--bandwidth", "nan"], "--bandwidth is nan"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_refused(run, options, said):
    result = run("inspect", "kimi-k3", *options)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_truncated_checkpoint(run, tiny, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny.draft / "config.json").read_bytes())
    whole = (tiny.draft / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    result = run("inspect", tmp_path)
    assert result.code == 2
    assert "truncated" in result.err
