# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The public names and their signatures. A change here is one that users will notice:
it belongs in CHANGELOG.md, under the next version that may break them."""

import dataclasses
import inspect
import re

import pytest

import sparkgap

NAMES = [
    "Buffers",
    "Draft",
    "DraftBatch",
    "DraftConfig",
    "Drafter",
    "InputError",
    "SparkgapError",
    "__version__",
    "step",
]

FIELDS = {
    "Buffers": "taps context_positions context_slots block sampling cache",
    "Draft": "tokens logits confidence",
    "DraftBatch": "requests anchors positions temperatures seeds",
}

SIGNATURES = {
    "Drafter": "(config, weights, *, max_requests=8, max_model_len=None, "
    "num_drafts=None, numerics='stock')",
    "Drafter.from_pretrained": "(path, *, embedding=None, lm_head=None, device='cpu', "
    "dtype=None, max_requests=8, max_model_len=None, num_drafts=None)",
    "Drafter.slots": "(self, request, positions)",
    "Drafter.add_context": "(self, hidden, positions, slots)",
    "Drafter.propose": "(self, batch, *, return_logits=True)",
    "Drafter.release": "(self, request)",
    "DraftConfig.from_pretrained": "(path)",
    "DraftConfig.from_dict": "(raw, *, name)",
    "DraftConfig.preset": "(name)",
    "DraftConfig.to_dict": "(self)",
    "step": "(model, buffers, numerics='stock', return_logits=True)",
}


def signature(name: str) -> str:
    """Parameters and defaults of a public thing, types left out."""
    found = sparkgap
    for part in name.split("."):
        found = getattr(found, part)
    described = inspect.signature(found)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in described.parameters.values()
    ]
    return str(
        described.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    )


def test_names():
    assert sparkgap.__all__ == NAMES
    assert dir(sparkgap) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name):
    assert getattr(sparkgap, name) is getattr(sparkgap, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert signature(name) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    fields = dataclasses.fields(getattr(sparkgap, name))
    assert " ".join(field.name for field in fields) == FIELDS[name]


def test_an_unknown_name_says_so():
    with pytest.raises(AttributeError, match="'sparkgap' has no attribute 'Drafer'"):
        sparkgap.Drafer  # noqa: B018


def test_errors_are_caught_by_their_base():
    assert issubclass(sparkgap.InputError, sparkgap.SparkgapError)
    assert issubclass(sparkgap.InputError, ValueError)


def test_version_is_semantic():
    assert re.fullmatch(r"\d+\.\d+\.\d+", sparkgap.__version__)
