# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Batches, labels and losses of the draft in training, against naive loops and against
the drafter that serves."""

from dataclasses import replace

import pytest
import torch

from sparkgap.config import DraftConfig
from sparkgap.drafter import DraftBatch, Drafter
from sparkgap.errors import InputError
from sparkgap.speculate.target import Target
from sparkgap.train.batch import TargetView, draw_anchors
from sparkgap.train.corpus import Corpus
from sparkgap.train.draft import DraftInTraining, Sequences
from sparkgap.weights import random_weights


def view_of(target: Target, config: DraftConfig, corpus: Corpus) -> TargetView:
    view = TargetView(target, config.target_layer_ids)
    view.measure(corpus.tokens.long())
    return view


def test_anchors_lie_on_paths_the_target_took(corpus: Corpus) -> None:
    draw = torch.Generator().manual_seed(0)
    anchors = draw_anchors(corpus.natural, 20, 4, draw)
    length = corpus.natural.shape[1]
    assert anchors.positions.shape == (len(corpus.natural), 20)
    for row, positions in enumerate(anchors.positions.tolist()):
        live = corpus.natural[row].tolist()
        drawn = [
            at
            for at, valid in zip(positions, anchors.valid[row], strict=True)
            if valid.any()
        ]
        assert len(set(drawn)) == len(drawn)
        for index, at in enumerate(positions):
            for j in range(4):
                path = at + 1 + j < length and all(live[at : at + 2 + j])
                assert bool(anchors.valid[row, index, j]) == path


def test_rows_with_nothing_natural_count_nothing() -> None:
    natural = torch.zeros(2, 9, dtype=torch.bool)
    anchors = draw_anchors(natural, 3, 4, torch.Generator().manual_seed(0))
    assert not anchors.valid.any()


def test_taps_are_the_layers_outputs(
    target: Target, config: DraftConfig, corpus: Corpus
) -> None:
    tokens = corpus.tokens[:2].long()
    states = target.model(tokens, output_hidden_states=True).hidden_states
    view = view_of(target, config, corpus)
    taps, final = view(tokens)
    # hidden_states[0] is the embedding, so layer i's output is hidden_states[i + 1].
    want = torch.stack([states[i + 1] for i in config.target_layer_ids], 2).flatten(
        0, 1
    )
    torch.testing.assert_close(taps / view.scale, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, states[-1].flatten(0, 1))
    rms = (taps.unflatten(0, tokens.shape)[:, 1:]).square().mean().sqrt()
    assert 0.5 < float(rms) < 2.0


def test_the_scale_must_be_measured_first(target: Target, config: DraftConfig) -> None:
    with pytest.raises(RuntimeError, match="measure"):
        TargetView(target, config.target_layer_ids)(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("causal", [False, True])
def test_training_computes_what_the_drafter_serves(
    target: Target, config: DraftConfig, corpus: Corpus, causal: bool
) -> None:
    config = replace(config, causal=causal)
    weights = random_weights(config)
    view = view_of(target, config, corpus)
    tokens = corpus.tokens[:2].long()
    taps, final = view(tokens)
    training = DraftInTraining(config, weights, 256)
    positions = torch.tensor([[0, 7, 64], [1, 100, 127 - 4]])
    hidden = training.hidden(Sequences(tokens, taps, final), positions)
    served = Drafter(config, weights, max_model_len=256)
    for row in range(2):
        for index, at in enumerate(positions[row].tolist()):
            places = torch.arange(at)
            served.add_context(
                taps.unflatten(0, tokens.shape)[row, :at],
                places,
                served.slots("r", places),
            )
            batch = DraftBatch(
                ["r"], tokens[row, at : at + 1], torch.tensor([at]), *zeros()
            )
            seen: list[torch.Tensor] = []
            sample = served.model.sample
            object.__setattr__(
                served.model,
                "sample",
                lambda h, *a, _keep=seen, _do=sample: _keep.append(h) or _do(h, *a),
            )
            served.propose(batch)
            object.__setattr__(served.model, "sample", sample)
            served.release("r")
            torch.testing.assert_close(
                seen[0][0], hidden[row * 3 + index], rtol=2e-4, atol=2e-4
            )


def zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1), torch.zeros(1, dtype=torch.int64)


def test_labels_name_the_position_whose_distribution_counts(
    target: Target, config: DraftConfig, corpus: Corpus
) -> None:
    tokens = corpus.tokens[:3].long()
    training = DraftInTraining(config, random_weights(config), 256)
    view = view_of(target, config, corpus)
    seqs = Sequences(tokens, *view(tokens))
    positions = torch.tensor([[2, 9], [0, 3], [50, 60]])
    previous, at = training.labels(seqs, positions)
    for row in range(3):
        for index in range(2):
            a = int(positions[row, index])
            for j in range(config.num_drafts):
                assert int(previous[row * 2 + index, j]) == int(tokens[row, a + j])
                assert int(at[row * 2 + index, j]) == row * tokens.shape[1] + a + j


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "vanilla"),
        ({"markov_head_type": "gated"}, "vanilla"),
        ({"sample_from_anchor": False}, "anchor-first"),
        ({"draft_vocab_size": 100}, "vocabulary"),
    ],
)
def test_what_the_recipe_cannot_train_is_refused(
    change: dict[str, object], reason: str
) -> None:
    from tiny import draft_config

    config = DraftConfig.from_dict(draft_config(**change), name="odd")
    with pytest.raises(InputError, match=reason):
        DraftInTraining(config, random_weights(config), 64)
