# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The default target with the shipped drafter, as a new user meets them."""

import pytest

pytestmark = pytest.mark.demo

pytest.importorskip("sparkgap_demo")


def test_generate_without_options(run):
    result = run(
        *("generate", "Explain why the sky is blue."),
        *("--max-new-tokens", 32, "--json", "--compare"),
    )
    assert result.code == 0, result.err
    found = result.json
    assert found["identical"] is True
    assert "sky" in found["text"]
    assert found["accepted_length"] > 1.5
    assert any(token["drafted"] for token in found["tokens"])


def test_doctor_finds_both(run):
    found = run("doctor", "--json").json
    assert found["default_target"]["found"]
    assert found["shipped_drafter"]["found"]


def test_inspect_the_shipped_drafter(run):
    path = run("doctor", "--json").json["shipped_drafter"]["path"]
    shipped = run("inspect", path, "--json").json
    assert (
        shipped["parameters"]
        == run("inspect", "smollm2-135m", "--json").json["parameters"]
    )
