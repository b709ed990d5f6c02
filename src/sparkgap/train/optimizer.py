# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Muon for the draft's matrices, AdamW for everything a step touches row by row or
scale by scale, one cosine schedule for both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a run of `steps`: linear warm-up, then a cosine to zero.

    The CE weight falls from 1 to its final value over the first 15 % of the run: total
    variation alone has no gradient where the two distributions do not overlap.
    """

    steps: int
    muon: float = 3e-3
    adamw: float = 1.5e-3
    warmup: int = 100
    ce: float = 0.1
    tv: float = 0.9

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at a step."""
        rise = min(1.0, (step + 1) / min(self.warmup, self.steps))
        return rise * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def ce_weight(self, step: int) -> float:
        """Weight of the cross-entropy at a step."""
        return self.ce + (1 - self.ce) * max(0.0, 1 - step / (0.15 * self.steps))


class Optimizers:
    """Both optimizers over named parameters; their state is a flat dict of tensors."""

    def __init__(self, parameters: Mapping[str, Tensor], schedule: Schedule) -> None:
        matrices = {
            n: p for n, p in parameters.items() if p.dim() == 2 and _is_hidden(n)
        }
        rest = {n: p for n, p in parameters.items() if n not in matrices}
        self.schedule = schedule
        self.names = [list(matrices), list(rest)]
        self.parts: list[Optimizer] = [
            Muon(
                list(matrices.values()),
                lr=schedule.muon,
                weight_decay=0.01,
                adjust_lr_fn="match_rms_adamw",
            ),
            AdamW(list(rest.values()), lr=schedule.adamw, weight_decay=0.0),
        ]
        self.peaks = [schedule.muon, schedule.adamw]

    def step(self, step: int) -> None:
        """Apply the gradients at the schedule's rate and clear them."""
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * self.schedule.factor(step)
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every moment as "<slot>:<parameter>" → tensor."""
        return {
            f"{slot}:{name}": torch.as_tensor(value)
            for part, names in zip(self.parts, self.names, strict=True)
            for index, held in part.state_dict()["state"].items()
            for slot, value in held.items()
            for name in [names[index]]
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`."""
        for part, names in zip(self.parts, self.names, strict=True):
            loaded = part.state_dict()
            for index, name in enumerate(names):
                held = {
                    slot: value
                    for key, value in state.items()
                    for slot, _, owner in [key.partition(":")]
                    if owner == name
                }
                if held:
                    loaded["state"][index] = held
            part.load_state_dict(loaded)


def _is_hidden(name: str) -> bool:
    """Muon's orthogonal steps suit dense maps between hidden spaces, not tables that a
    step touches in a few rows, nor a single output row."""
    return not name.startswith(("markov.", "confidence."))
