# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A tiny target and a corpus of its own, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparkgap.config import DraftConfig
from sparkgap.speculate.target import Target
from sparkgap.train.corpus import Corpus, CorpusPlan, generate_corpus
from tiny import draft_config, write_target

PLAN = CorpusPlan(batches=2, rows=6, length=128, answer_cap=12, seed=3)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def target(folder: Path) -> Target:
    """A fresh one each time: training leaves hooks on it."""
    return Target.from_pretrained(folder)


@pytest.fixture(scope="session")
def corpus(folder: Path) -> Corpus:
    return generate_corpus(
        Target.from_pretrained(folder), PLAN, prompts=["Hi there", "1+1?", "Tell me"]
    )


@pytest.fixture
def config() -> DraftConfig:
    return DraftConfig.from_dict(draft_config(), name="tiny")
