# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The draft in training: `sparkgap.model` with trainable weights, teacher forced.

The anchors of one sequence are requests that share its context, so this is the model
that serves, not a copy of it: latents of whole sequences play the paged cache, one
block-table row a sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.model import Block, DraftModel
from sparkgap.ops.confidence import confidence_logit
from sparkgap.ops.mla_decode import Extent
from sparkgap.train.batch import Anchors
from sparkgap.train.objective import Frozen, Weights, distill
from sparkgap.weights import DraftWeights

PAGE = 64


@dataclass(frozen=True)
class Sequences:
    """tokens [S, N]; taps [S * N, m, d_t] scaled; final [S * N, d_t] of the target."""

    tokens: Tensor
    taps: Tensor
    final: Tensor


@dataclass(frozen=True)
class Losses:
    """loss: to minimise. ce, tv: weighted means over valid rows; confidence: its
    binary cross-entropy; all scalars."""

    loss: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor


class DraftInTraining:
    """Config and weights; hidden states and losses of many anchors at once.

    Raises InputError for drafts this recipe cannot train: heads other than vanilla
    Markov, a reduced vocabulary, the fill-in layout.
    """

    def __init__(
        self, config: DraftConfig, weights: DraftWeights, max_positions: int
    ) -> None:
        reasons = []
        if config.markov is None or config.markov.kind != "vanilla":
            reasons.append("the Markov head must be vanilla")
        if config.draft_vocab_size != config.vocab_size:
            reasons.append("the draft vocabulary must be the target's")
        if not config.sample_from_anchor:
            reasons.append("the block must be anchor-first")
        if reasons:
            raise InputError(f"cannot train {config.name}: {'; '.join(reasons)}")
        self.config = config
        self.weights = weights
        self.model = DraftModel(config, weights, max_positions)

    def hidden(self, seqs: Sequences, positions: Tensor) -> Tensor:
        """Hidden states [R, k, d] of the anchors at positions [S, A], R = S * A."""
        c, (count, length) = self.config, seqs.tokens.shape
        device = seqs.tokens.device
        places = torch.arange(length, device=device).repeat(count)
        latents = self.model.context_latents(self.model.combine(seqs.taps), places)
        pages = -(-length // PAGE)
        latents = latents.unflatten(1, (count, length))
        latents = F.pad(latents, (0, 0, 0, pages * PAGE - length))
        caches = tuple(latents.reshape(c.num_layers, count * pages, PAGE, -1).unbind(0))
        flat = positions.flatten()
        ids = torch.full((len(flat), c.block_size), c.mask_token_id, device=device)
        ids[:, 0] = seqs.tokens.gather(1, positions).flatten()
        block = Block(
            ids,
            flat[:, None] + torch.arange(c.block_size, device=device),
            torch.arange(count * pages, device=device).view(count, pages),
            Extent(flat, torch.full_like(flat, c.block_size), c.causal),
        )
        return self.model.block(block, caches, (1.0,) * c.num_layers)

    def labels(self, seqs: Sequences, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For anchors [S, A]: previous token [R, k] of each row, and the flat index
        [R, k] of the target position whose distribution the row must match."""
        count, length = seqs.tokens.shape
        steps = torch.arange(self.config.num_drafts, device=positions.device)
        at = (positions[..., None] + steps).clamp(max=length - 1)
        previous = seqs.tokens.gather(1, at.flatten(1)).view(-1, len(steps))
        start = torch.arange(count, device=positions.device)[:, None, None] * length
        return previous.long(), (at + start).view(-1, len(steps))

    def losses(
        self, seqs: Sequences, anchors: Anchors, lm_head: Tensor, weights: Weights
    ) -> Losses:
        """Distillation and confidence losses; position j weighs exp(-j / 4)."""
        w = self.weights
        if w.markov is None:
            raise InputError("cannot train a draft without a Markov head")
        hidden = self.hidden(seqs, anchors.positions).flatten(0, 1)
        previous, at = self.labels(seqs, anchors.positions)
        steps = torch.arange(self.config.num_drafts, device=hidden.device)
        valid = anchors.valid.flatten(0, 1)
        weight = (valid * torch.exp(-steps / 4.0)).flatten()
        weight = weight / weight.sum().clamp_min(1.0)
        embedded = F.embedding(previous.flatten(), w.markov.w1)
        frozen = Frozen(lm_head, seqs.final[at.flatten()])
        loss, ce, tv = distill(hidden, embedded, w.markov.w2, frozen, weight, weights)
        surprise = hidden.new_zeros(())
        if w.confidence is not None:
            seen = embedded if self.config.confidence == "markov" else None
            logit = confidence_logit(
                hidden, seen, w.confidence.weight, w.confidence.bias
            )
            each = F.binary_cross_entropy_with_logits(logit, 1 - tv, reduction="none")
            surprise = (each * weight).sum()
        return Losses(
            loss + surprise,
            (ce * weight).sum().detach(),
            (tv * weight).sum().detach(),
            surprise.detach(),
        )
