# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The run: it learns, resumes bit for bit, exports what it trained."""

from pathlib import Path

import pytest
import torch

from sparkgap.checkpoint import load_weights, save_checkpoint
from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.model import DraftModel
from sparkgap.speculate.target import Target
from sparkgap.train.corpus import Corpus, CorpusPlan
from sparkgap.train.evaluate import _walk, accepted_length
from sparkgap.train.optimizer import Schedule
from sparkgap.train.parameters import named_tensors, with_tensors
from sparkgap.train.recipe import Geometry, geometry_for, make_corpus, mask_token
from sparkgap.train.trainer import Trainer, TrainSettings, TrainState
from sparkgap.weights import random_weights

SETTINGS = TrainSettings(
    Schedule(steps=8, warmup=2), sequences=3, anchors=5, save_every=4
)


def quiet(_state: TrainState) -> None:
    """No progress."""


def test_losses_fall(
    target: Target, config: DraftConfig, corpus: Corpus, tmp_path: Path
) -> None:
    settings = TrainSettings(Schedule(steps=60, warmup=5), sequences=6, anchors=16)
    trainer = Trainer(config, target, corpus, settings)
    trainer.run(tmp_path, quiet)
    first, last = trainer.state.history[0], trainer.state.history[-1]
    assert [row[0] for row in trainer.state.history] == [20, 40, 60]
    assert last[2] < first[2]


def test_a_resumed_run_is_the_unbroken_one(
    folder: Path, config: DraftConfig, corpus: Corpus, tmp_path: Path
) -> None:
    whole = Trainer(config, Target.from_pretrained(folder), corpus, SETTINGS)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole.run(tmp_path / "a", quiet)
    first = Trainer(config, Target.from_pretrained(folder), corpus, SETTINGS)
    assert not first.resume(tmp_path / "b")
    first.run(tmp_path / "b", quiet, until=4)
    second = Trainer(config, Target.from_pretrained(folder), corpus, SETTINGS)
    assert second.resume(tmp_path / "b")
    assert second.state.step == 4
    second.run(tmp_path / "b", quiet)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


def test_another_run_is_not_resumed(
    target: Target, config: DraftConfig, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = Trainer(config, target, corpus, SETTINGS)
    trainer.run(tmp_path, quiet, until=1)
    other = TrainSettings(Schedule(steps=9), sequences=3, anchors=5)
    with pytest.raises(InputError, match="other settings"):
        Trainer(config, target, corpus, other).resume(tmp_path)


def test_export_takes_raw_taps(
    target: Target, config: DraftConfig, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = Trainer(config, target, corpus, SETTINGS)
    trainer.run(tmp_path, quiet, until=2)
    save_checkpoint(tmp_path, config, trainer.exported(torch.float32))
    loaded = DraftModel(config, load_weights(tmp_path, config), 64)
    taps, _ = trainer.view(corpus.tokens[:1].long())
    want = trainer.draft.model.combine(taps)
    got = loaded.combine(taps / trainer.view.scale)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_parameters_walk_the_whole_tree(config: DraftConfig) -> None:
    weights = random_weights(config)
    named = named_tensors(weights)
    assert {"layers.1.down", "markov.w2", "confidence.bias", "embedding"} <= set(named)
    doubled = with_tensors(weights, {n: 2 * t for n, t in named.items()})
    for name, tensor in named_tensors(doubled).items():
        assert torch.equal(tensor, 2 * named[name])


def test_schedule_rises_and_falls() -> None:
    schedule = Schedule(steps=1000, warmup=100)
    rates = [schedule.factor(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(0.98, abs=0.02)
    assert rates[-1] < 1e-4
    assert schedule.ce_weight(0) == 1.0
    assert schedule.ce_weight(150) == pytest.approx(0.1)


def test_walk_counts_whole_rounds_only() -> None:
    # k = 2: a round at 1 accepts both drafts, the one at 4 one of them; the next, at 6,
    # would leave the natural stretch.
    natural = [[False, True, True, True, True, True, True, True, False]]
    runs = [[9, 2, 9, 9, 1, 9, 9, 9, 9]]
    assert _walk(runs, natural, drafts=2) == [0, 1, 1]


def test_accepted_length_lies_in_its_range(
    target: Target, config: DraftConfig, corpus: Corpus
) -> None:
    trainer = Trainer(config, target, corpus, SETTINGS)
    trainer.view.measure(corpus.tokens.long())
    found = accepted_length(
        trainer.draft, trainer.view, trainer.lm_head, corpus, greedy=False
    )
    assert found.rounds > 0
    assert 1.0 <= found.length <= 1 + config.num_drafts
    assert all(
        a >= b for a, b in zip(found.by_position, found.by_position[1:], strict=False)
    )


def test_geometry_fits_any_target(target: Target) -> None:
    config = geometry_for("mine", target, Geometry(taps=2, layers=1, heads=2))
    assert config.target_layer_ids == (1, 2)
    assert config.hidden_size == target.hidden_size
    assert config.vocab_size == target.vocab_size
    assert config.mask_token_id == mask_token(target.tokenizer) == 258
    with pytest.raises(InputError, match="--taps"):
        geometry_for("mine", target, Geometry(taps=5))


def test_a_corpus_of_another_plan_is_not_taken(target: Target, tmp_path: Path) -> None:
    def silent(_stage: str, _share: float) -> None:
        """No progress."""

    plan = CorpusPlan(batches=1, rows=2, length=64, answer_cap=8, invented=0.0)
    made = make_corpus(tmp_path, target, plan, silent)
    again = make_corpus(tmp_path, target, plan, silent)
    assert torch.equal(made.tokens, again.tokens)
    other = CorpusPlan(batches=1, rows=3, length=64, answer_cap=8, invented=0.0)
    with pytest.raises(InputError, match="other settings"):
        make_corpus(tmp_path, target, other, silent)
