# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Accepted length without running the loop: teacher-forced drafts along real outputs.

On sequences that the target sampled itself, drafted token j of an anchor is accepted
with chance min(1, p_draft(x) / p_target(x)) for the token x that stands there: walking
a sequence with those coins has the law of rejection sampling. Greedy is a prefix match.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkgap.train.batch import TargetView
from sparkgap.train.corpus import Corpus
from sparkgap.train.draft import DraftInTraining, Sequences

# Sequences a pass: all their positions are anchors, 8 × 512 × 7 rows of logits at once
# would be 5.6 GB at V = 49152.
AT_ONCE = 4


@dataclass(frozen=True)
class Acceptance:
    """length: tokens a round, the target's own included; by_position[j]: share of
    rounds that accept at least j + 1 drafts; rounds: how many the means are over."""

    length: float
    by_position: tuple[float, ...]
    rounds: int


@torch.no_grad()
def accepted_length(
    draft: DraftInTraining,
    target: TargetView,
    lm_head: Tensor,
    corpus: Corpus,
    greedy: bool,
    seed: int = 0,
) -> Acceptance:
    """Walk every answer of `corpus`, whose tokens were drawn at temperature 0 (greedy)
    or 1, round by round."""
    coins = torch.Generator(corpus.tokens.device).manual_seed(seed)
    runs = []
    for at in range(0, len(corpus.tokens), AT_ONCE):
        tokens = corpus.tokens[at : at + AT_ONCE].long()
        taps, final = target(tokens)
        runs.append(
            _runs(draft, Sequences(tokens, taps, final), lm_head, greedy, coins)
        )
    counts = _walk(
        torch.cat(runs).tolist(), corpus.natural.tolist(), draft.config.num_drafts
    )
    rounds = max(sum(counts), 1)
    drafts = draft.config.num_drafts
    reached = [sum(counts[j + 1 :]) / rounds for j in range(drafts)]
    return Acceptance(1 + sum(reached), tuple(reached), sum(counts))


def _runs(
    draft: DraftInTraining,
    seqs: Sequences,
    lm_head: Tensor,
    greedy: bool,
    coins: torch.Generator,
) -> Tensor:
    """Accepted drafts [S, N] if a round started with its anchor at each position."""
    markov = draft.weights.markov
    count, length = seqs.tokens.shape
    drafts = draft.config.num_drafts
    places = torch.arange(length, device=seqs.tokens.device).expand(count, -1)
    hidden = draft.hidden(seqs, places).flatten(0, 1)
    previous, at = draft.labels(seqs, places)
    logits = hidden @ lm_head.T
    if markov is not None:
        logits += F.embedding(previous.flatten(), markov.w1) @ markov.w2.T
    reach = (places[..., None] + 1 + torch.arange(drafts, device=places.device)).clamp(
        max=length - 1
    )
    token = seqs.tokens.gather(1, reach.flatten(1)).flatten()
    if greedy:
        accepted = logits.argmax(-1) == token
    else:
        target = (seqs.final @ lm_head.T).log_softmax(-1)[at.flatten()]
        ratio = _chosen(logits.log_softmax(-1), token) - _chosen(target, token)
        coin = torch.rand(ratio.shape, generator=coins, device=ratio.device)
        accepted = coin.log() < ratio
    return accepted.view(count, length, drafts).cumprod(-1).sum(-1)


def _chosen(log_probs: Tensor, token: Tensor) -> Tensor:
    return log_probs.gather(1, token[:, None])[:, 0]


def _walk(runs: list[list[int]], natural: list[list[bool]], drafts: int) -> list[int]:
    """How many rounds accepted 0, 1, … k drafts, over each stretch of natural tokens.

    A round whose drafts would leave the stretch is not counted: what the target would
    have said there is unknown.
    """
    counts = [0] * (drafts + 1)
    for run, live in zip(runs, natural, strict=True):
        at = 0
        while at + drafts + 1 < len(run):
            if not all(live[at : at + drafts + 2]):
                at += 1
                continue
            counts[run[at]] += 1
            at += run[at] + 1
    return counts
