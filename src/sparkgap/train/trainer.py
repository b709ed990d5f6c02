# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The training run: corpus → steps → checkpoint, resumable at every save.

Everything lives in one folder:

    corpus.safetensors     tokens and natural (`corpus.py`)
    state.safetensors      parameters, optimizer moments, tap scale
    state.json             the step reached, the settings, the history of losses
    config.json, model.safetensors, training.json    the exported draft

A run continues from state.* when its settings are the ones it was started with. Batches
depend on (seed, step) only, so that a resumed run draws what an unbroken one would.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.speculate.target import Target
from sparkgap.train.batch import TargetView, corpus_rows, draw_anchors
from sparkgap.train.corpus import Corpus
from sparkgap.train.draft import DraftInTraining, Losses, Sequences
from sparkgap.train.objective import Weights
from sparkgap.train.optimizer import Optimizers, Schedule
from sparkgap.train.parameters import named_tensors, with_tensors
from sparkgap.weights import DraftWeights, random_weights

# Tokens of an evaluation sequence: a question and an answer of up to 200 tokens.
HELD_OUT_LENGTH = 256


@dataclass(frozen=True)
class TrainSettings:
    """Steps of `sequences` sequences × `anchors` anchors, and when to save.

    held_out: prompts of each of the eight kinds to evaluate on at the end, at most 6.
    """

    schedule: Schedule
    sequences: int = 64
    anchors: int = 64
    seed: int = 0
    save_every: int = 500
    held_out: int = 6


@dataclass
class TrainState:
    """The step reached, and the losses on the way: [step, ce, tv, confidence]."""

    step: int = 0
    history: list[list[float]] = field(default_factory=list)


class Trainer:
    """A draft being trained for one target.

    The target is frozen and on the device to train on.
    """

    def __init__(
        self,
        config: DraftConfig,
        target: Target,
        corpus: Corpus,
        settings: TrainSettings,
    ) -> None:
        self.config, self.settings, self.corpus = config, settings, corpus
        device = target.device
        self.view = TargetView(target, config.target_layer_ids)
        self.lm_head = target.lm_head.detach().float()
        embedding = target.embedding.detach().float()
        weights = first_weights(config, target, settings.seed)
        self.parameters = {
            name: tensor.to(device).requires_grad_()
            for name, tensor in named_tensors(weights).items()
        }
        weights = with_tensors(weights, self.parameters)
        bound = replace(weights, embedding=embedding, lm_head=self.lm_head)
        length = max(corpus.tokens.shape[1], HELD_OUT_LENGTH) + config.block_size
        self.draft = DraftInTraining(config, bound, length)
        self.optimizers = Optimizers(self.parameters, settings.schedule)
        self.state = TrainState()

    def run(
        self,
        folder: Path,
        progress: Callable[[TrainState], None],
        until: int | None = None,
    ) -> None:
        """Train up to step `until` (default: the last), saving on the way and then."""
        if self.view.scale is None:
            self.view.measure(self._sequences(0)[:16])
        end = min(until or self.settings.schedule.steps, self.settings.schedule.steps)
        while self.state.step < end:
            losses = self._step(self.state.step)
            self.state.step += 1
            if self.state.step % 20 == 0 or self.state.step == end:
                values = [float(losses.ce), float(losses.tv), float(losses.confidence)]
                self.state.history.append([self.state.step, *values])
                progress(self.state)
            if (
                self.state.step % self.settings.save_every == 0
                or self.state.step == end
            ):
                self.save(folder)

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)

    def _sequences(self, step: int) -> Tensor:
        rows = corpus_rows(self.corpus, self.settings.sequences, self._generator(step))
        return self.corpus.tokens[rows].long()

    def _step(self, step: int) -> Losses:
        draw = self._generator(step)
        rows = corpus_rows(self.corpus, self.settings.sequences, draw)
        tokens = self.corpus.tokens[rows].long()
        anchors = draw_anchors(
            self.corpus.natural[rows],
            self.settings.anchors,
            self.config.num_drafts,
            draw,
        )
        schedule = self.settings.schedule
        losses = self.draft.losses(
            Sequences(tokens, *self.view(tokens)),
            anchors,
            self.lm_head,
            Weights(schedule.ce_weight(step), schedule.tv),
        )
        losses.loss.backward()
        self.optimizers.step(step)
        return losses

    def save(self, folder: Path) -> None:
        """Write state.* (renamed into place, so that a crash leaves the last one)."""
        if self.view.scale is None:
            raise RuntimeError("nothing to save before the first step")
        held = {f"parameter:{n}": p.detach() for n, p in self.parameters.items()}
        held |= {f"moment:{n}": t for n, t in self.optimizers.state().items()}
        held["tap_scale"] = self.view.scale
        half = folder / "state.part"
        save_file({n: t.contiguous() for n, t in held.items()}, half)
        half.replace(folder / "state.safetensors")
        note = {
            "step": self.state.step,
            "settings": asdict(self.settings),
            "config": self.config.to_dict(),
            "history": self.state.history,
        }
        (folder / "state.json").write_text(json.dumps(note) + "\n")

    def resume(self, folder: Path) -> bool:
        """Continue from state.* if it is there; InputError if it is of another run."""
        note_path = folder / "state.json"
        if not note_path.exists():
            return False
        note = json.loads(note_path.read_text())
        mine = json.loads(json.dumps([asdict(self.settings), self.config.to_dict()]))
        if [note["settings"], note["config"]] != mine:
            raise InputError(
                f"{folder} holds a run with other settings, at step {note['step']}: "
                "give the settings it was started with, or another --out"
            )
        held = load_file(folder / "state.safetensors")
        device = self.lm_head.device
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(held[f"parameter:{name}"])
        moments = {
            name.removeprefix("moment:"): tensor
            for name, tensor in held.items()
            if name.startswith("moment:")
        }
        self.optimizers.load(moments)
        self.view.scale = held["tap_scale"].to(device)
        self.state = TrainState(note["step"], note["history"])
        return True

    def exported(self, dtype: torch.dtype = torch.bfloat16) -> DraftWeights:
        """The draft's weights for raw taps: the tap scale folded into context_proj."""
        if self.view.scale is None:
            raise RuntimeError("nothing to export before the first step")
        scale = self.view.scale.flatten()
        folded: Mapping[str, Tensor] = {
            name: (p.detach() * scale if name == "context_proj" else p.detach())
            .to(dtype)
            .cpu()
            .contiguous()
            for name, p in self.parameters.items()
        }
        bare = replace(self.draft.weights, embedding=None, lm_head=None)
        return with_tensors(bare, folded)


def first_weights(config: DraftConfig, target: Target, seed: int) -> DraftWeights:
    """Where training starts: random weights, the target's final norm scaled by 0.2.

    With the final norm as it is, a mask row copies its own embedding to the output and
    training starts at a cross-entropy of 100 instead of 27.
    """
    weights = replace(random_weights(config, seed=seed), embedding=None, lm_head=None)
    final = final_norm(target.model)
    if final is not None and final.shape == weights.final_norm.shape:
        weights = replace(weights, final_norm=final.detach().float().cpu() * 0.2)
    markov = weights.markov
    if markov is not None:
        # A zero W2 starts the head silent; W1 learns as soon as W2 moves.
        quiet = replace(markov, w1=markov.w1 * 0.02, w2=torch.zeros_like(markov.w2))
        weights = replace(weights, markov=quiet)
    return weights


def final_norm(model: Any) -> Tensor | None:
    """The weight of the target's last norm, wherever its architecture keeps it."""
    for name in ("norm", "ln_f", "final_layer_norm", "final_layernorm"):
        module = getattr(model.base_model, name, None)
        if module is not None:
            weight: Tensor = module.weight
            return weight
    return None
