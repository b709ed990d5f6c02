# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""One training batch: sequences, the target's view of them, and the anchors drawn.

The target runs over whole sequences once (taps are recomputed, never stored); every
anchor then is a request of the draft model that shares its sequence's context. For S
sequences of length N with A anchors each, R = S * A requests of q = k block rows:

    taps [S * N, m, d_t]    scaled outputs of the tapped layers
    final [S * N, d_t]      the target's last hidden states, its lm_head's input
    positions [S, A]        where the anchors stand
    valid [S, A, k]         which label rows count
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkgap.speculate.target import Target
from sparkgap.train.corpus import Corpus


@dataclass(frozen=True)
class Anchors:
    """Where to draft from: positions [S, A] and which label rows [S, A, k] count."""

    positions: Tensor
    valid: Tensor


def draw_anchors(
    natural: Tensor, count: int, drafts: int, generator: torch.Generator
) -> Anchors:
    """`count` anchors a sequence among tokens the target chose; natural [S, N] bool.

    An anchor needs one natural token after itself. Label row j (the token at
    anchor + 1 + j) counts while every token up to it is natural: a queued token breaks
    the path the draft would have taken. A sequence with too few anchors repeats
    positions whose rows do not count.
    """
    length = natural.shape[1]
    possible = natural[:, :-1] & natural[:, 1:]
    noise = torch.rand(possible.shape, generator=generator, device=generator.device).to(
        natural.device
    )
    chance, positions = (noise * possible).topk(min(count, length - 1), dim=1)
    reach = positions[..., None] + 1 + torch.arange(drafts, device=natural.device)
    inside = reach < length
    held = natural.gather(1, reach.clamp(max=length - 1).flatten(1)).view(reach.shape)
    path = (held & inside).cumprod(-1).bool()
    return Anchors(positions, path & (chance > 0)[..., None])


class TargetView:
    """The frozen target: taps and final hidden states of whole sequences.

    `scale` [m, d_t]: 1 / RMS of each tapped channel, measured once. Channels differ by
    a factor of 400, which a projection trained from scratch does not survive; the scale
    is folded into context_proj at export.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...]) -> None:
        self.base = target.model.base_model
        self._taps: dict[int, Tensor] = {}
        for tap in tap_ids:
            target.layers[tap].register_forward_hook(self._keep(tap))
        self.tap_ids = tap_ids
        self.scale: Tensor | None = None

    def _keep(self, tap: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._taps[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def measure(self, tokens: Tensor) -> None:
        """Fix `scale` from sequences [S, N], without position 0, an attention sink."""
        taps, _ = self._run(tokens)
        wide = taps.unflatten(0, tokens.shape)[:, 1:].float()
        self.scale = wide.square().mean((0, 1)).clamp_min(1e-8).rsqrt()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [S, N] → scaled taps [S * N, m, d_t] fp32, final [S * N, d_t] fp32."""
        if self.scale is None:
            raise RuntimeError("measure() must fix the tap scale first")
        taps, final = self._run(tokens)
        return taps.float() * self.scale, final.float()

    def _run(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out = self.base(input_ids=tokens, use_cache=False)
        taps = torch.stack([self._taps[tap] for tap in self.tap_ids], dim=2)
        self._taps.clear()
        return taps.flatten(0, 1), out.last_hidden_state.flatten(0, 1)


def corpus_rows(corpus: Corpus, count: int, generator: torch.Generator) -> Tensor:
    """Indices [count] of sequences drawn without replacement (as far as they last)."""
    total = corpus.tokens.shape[0]
    order = torch.randperm(total, generator=generator)
    return order[torch.arange(count) % total].to(corpus.tokens.device)
