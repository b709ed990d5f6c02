# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""What holds for every test: no network, no luck, and paths of the tree."""

import os
from pathlib import Path

import hypothesis
import pytest

# Before transformers is imported: a test that would need a hub fails instead.
os.environ["HF_HUB_OFFLINE"] = "1"

# The same examples each time, so that a failure is one of the code's; no deadline,
# since the machines that run this are shared.
hypothesis.settings.register_profile(
    "sparkgap", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("sparkgap")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent
