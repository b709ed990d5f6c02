# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""generate: draft, verify, keep; and what a run of it amounts to.

A round, with `anchor` the last token put out, at position n, and everything before it
in the target's cache and the drafter's context:

    drafter.propose(anchor at n)            → k drafts, and the logits they came from
    sequence.forward([anchor, *drafts])     → k+1 rows of target logits, their taps
    verify                                  → a drafts kept, one token of the target's
    sequence.crop(n + a + 1)                  rows of refused drafts are forgotten
    drafter.add_context(taps[: a + 1])        rows n … n + a are now context
    anchor = the target's token, at n + a + 1

Invariant between rounds: target cache and draft context both hold exactly the positions
before the anchor's. Text is the target's own: identical to `decode_plain` when greedy
(in fp32, up to ties), equally distributed otherwise.
"""

import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparkgap.drafter import DraftBatch
from sparkgap.errors import InputError
from sparkgap.speculate.verify import (
    GREEDY_BELOW,
    RULES,
    Method,
    Verdict,
    draw,
    greedy_verify,
    probabilities,
    scatter_to_target,
    verification_generator,
)


class SequenceLike(Protocol):
    """`target.TargetSequence`, or what stands for it in a test."""

    def forward(self, ids: Sequence[int], rows: int) -> tuple[Tensor, Tensor]: ...
    def crop(self, length: int) -> None: ...


class TargetLike(Protocol):
    """`target.Target`, or what stands for it in a test."""

    @property
    def max_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def prepare(self, rows: int) -> None: ...
    def open(self, taps: Sequence[int] = ()) -> SequenceLike: ...


class DrafterLike(Protocol):
    """`sparkgap.Drafter`, or what stands for it in a test.

    config needs `target_layer_ids`; d2t [Vd] is None unless the draft's vocabulary is
    reduced.
    """

    config: Any

    @property
    def num_drafts(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def d2t(self) -> Tensor | None: ...
    def slots(self, request: Hashable, positions: Tensor) -> Tensor: ...
    def add_context(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None: ...
    def propose(self, batch: DraftBatch, *, return_logits: bool = True) -> Any: ...
    def release(self, request: Hashable) -> None: ...


@dataclass(frozen=True)
class Round:
    """What one pass of the target put out.

    tokens: the first `accepted` were drafted, the rest are the target's own. drafted:
    how many drafts were tried; 0 for the prompt's pass, which gives the first token.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int


def generate(
    target: TargetLike,
    drafter: DrafterLike,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    method: Method = "block",
) -> Iterator[Round]:
    """Continue prompt_ids; one Round a pass of the target, the first right after the
    prompt.

    Ends with a token of eos_ids (given out), after max_new_tokens tokens, or when the
    text fills the smaller of the target's and the drafter's lengths. The same seed
    gives the same text. Raises InputError for an empty or too long prompt before the
    first pass; the drafter forgets the request however the iteration ends.
    """
    settings = _Settings(max_new_tokens, temperature, seed, frozenset(eos_ids))
    limit = min(target.max_length, drafter.max_model_len)
    budget = _budget(prompt_ids, settings, limit, target.vocab_size)
    if method not in RULES:
        raise InputError(f"unknown method {method!r}, wanted one of {sorted(RULES)}")
    return _rounds(target, drafter, prompt_ids, settings, budget, limit, method)


def decode_plain(
    target: TargetLike,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_ids: Collection[int] = (),
) -> Iterator[int]:
    """The same target without a draft, one row a pass: what `generate` is held against.

    Ends as `generate` does, the drafter's length apart.
    """
    settings = _Settings(max_new_tokens, temperature, seed, frozenset(eos_ids))
    budget = _budget(prompt_ids, settings, target.max_length, target.vocab_size)
    return _tokens(target, prompt_ids, settings, budget)


@dataclass(frozen=True)
class _Settings:
    max_new_tokens: int
    temperature: float
    seed: int
    eos_ids: frozenset[int]

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _budget(
    prompt_ids: Sequence[int], settings: _Settings, limit: int, vocab_size: int
) -> int:
    """Tokens that may be put out; checks everything the caller gave."""
    problems = []
    if not prompt_ids:
        problems.append("the prompt is empty; give at least one token")
    elif not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        problems.append(
            f"prompt tokens span {min(prompt_ids)} to {max(prompt_ids)}, the target "
            f"has 0 to {vocab_size - 1}"
        )
    if len(prompt_ids) > limit:
        problems.append(
            f"the prompt has {len(prompt_ids)} tokens, target and drafter take at most "
            f"{limit}; shorten it"
        )
    if settings.max_new_tokens < 0:
        problems.append(
            f"max_new_tokens is {settings.max_new_tokens}, wanted 0 or more"
        )
    # `not >=` also catches NaN.
    if not settings.temperature >= 0 or settings.temperature == float("inf"):
        problems.append(
            f"temperature is {settings.temperature}, wanted 0 (greedy) or more"
        )
    if problems:
        raise InputError("cannot generate: " + "; ".join(problems))
    return min(settings.max_new_tokens, limit - len(prompt_ids))


def _rounds(
    target: TargetLike,
    drafter: DrafterLike,
    prompt_ids: Sequence[int],
    settings: _Settings,
    budget: int,
    limit: int,
    method: Method,
) -> Iterator[Round]:
    if budget <= 0:
        return
    request = object()
    generator = verification_generator(settings.seed)
    sequence = target.open(drafter.config.target_layer_ids)
    try:
        logits, taps = sequence.forward(prompt_ids, 1)
        anchor, position = _choose(logits, settings, generator), len(prompt_ids)
        done = Round((anchor,), 0, 0)
        yield done
        _add_context(drafter, request, taps, 0)
        target.prepare(drafter.num_drafts + 1)
        left = budget - 1
        while left > 0 and anchor not in settings.eos_ids:
            draft = drafter.propose(
                _batch(request, anchor, position, settings),
                return_logits=not settings.greedy,
            )
            # Drafts at or behind the length could be neither verified nor used.
            tried = min(drafter.num_drafts, limit - position - 1)
            drafts = draft.tokens[0, :tried].tolist()
            logits, taps = sequence.forward([anchor, *drafts], tried + 1)
            verdict = _verify(
                logits, draft, drafter.d2t, settings, RULES[method], generator
            )
            accepted, anchor = int(verdict.accepted), int(verdict.token)
            kept = accepted + 1
            sequence.crop(position + kept)
            _add_context(drafter, request, taps[:kept], position)
            done = _cut((*drafts[:accepted], anchor), tried, left, settings.eos_ids)
            yield done
            anchor = done.tokens[-1]
            position += kept
            left -= len(done.tokens)
    finally:
        drafter.release(request)


def _tokens(
    target: TargetLike, prompt_ids: Sequence[int], settings: _Settings, budget: int
) -> Iterator[int]:
    if budget <= 0:
        return
    generator = verification_generator(settings.seed)
    target.prepare(1)
    sequence = target.open()
    ids = prompt_ids
    for _ in range(budget):
        logits, _taps = sequence.forward(ids, 1)
        token = _choose(logits, settings, generator)
        yield token
        if token in settings.eos_ids:
            return
        ids = [token]


def _cut(
    tokens: tuple[int, ...], drafted: int, left: int, eos_ids: frozenset[int]
) -> Round:
    """tokens (the accepted, then one) up to the first eos and the budget."""
    ends = (i + 1 for i, token in enumerate(tokens) if token in eos_ids)
    size = min(next(ends, len(tokens)), left)
    return Round(tokens[:size], min(len(tokens) - 1, size), drafted)


def _add_context(
    drafter: DrafterLike, request: Hashable, taps: Tensor, first: int
) -> None:
    positions = torch.arange(first, first + taps.shape[0], device=taps.device)
    drafter.add_context(taps, positions, drafter.slots(request, positions))


def _batch(
    request: Hashable, anchor: int, position: int, settings: _Settings
) -> DraftBatch:
    temperature = 0.0 if settings.greedy else settings.temperature
    return DraftBatch(
        requests=(request,),
        anchors=torch.tensor([anchor]),
        positions=torch.tensor([position]),
        temperatures=torch.tensor([temperature], dtype=torch.float32),
        seeds=torch.tensor([settings.seed]),
    )


@torch.inference_mode()
def _verify(
    logits: Tensor,
    draft: Any,
    d2t: Tensor | None,
    settings: _Settings,
    rule: Any,
    generator: torch.Generator,
) -> Verdict:
    """logits [t+1, V]: the verdict on the first t drafts of draft.tokens [1, k]."""
    tried = logits.shape[0] - 1
    drafts = draft.tokens[:, :tried].to(logits.device)
    if settings.greedy:
        return greedy_verify(logits[None], drafts)
    p = probabilities(logits[None], settings.temperature)
    q = probabilities(draft.logits[:, :tried].to(logits.device), settings.temperature)
    if d2t is not None:
        q = scatter_to_target(q, d2t.to(q.device), p.shape[-1])
    noise = torch.rand(1, tried + 1, dtype=torch.float64, generator=generator)
    verdict: Verdict = rule(p, q, drafts, noise.to(logits.device))
    return verdict


@torch.inference_mode()
def _choose(logits: Tensor, settings: _Settings, generator: torch.Generator) -> int:
    """The target's own token from logits [1, V]."""
    if settings.greedy:
        return int(logits.argmax())
    noise = torch.rand(1, dtype=torch.float64, generator=generator)
    p = probabilities(logits, settings.temperature)
    return int(draw(p, noise.to(logits.device)))


@dataclass
class Statistics:
    """Counts rounds as they pass: `for done in statistics.watch(generate(…))`.

    Time is counted only while the rounds are made, not while the caller prints them.
    Every token put out counts, so a last round cut short by eos or the budget counts
    with what is left of it; of its positions only those decided before the cut do.
    """

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    seconds_to_first: float = 0.0
    round_tokens: int = 0
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def watch(self, rounds: Iterable[Round]) -> Iterator[Round]:
        source = iter(rounds)
        while True:
            started = time.perf_counter()
            done = next(source, None)
            self.seconds += time.perf_counter() - started
            if done is None:
                return
            self._count(done)
            yield done

    def _count(self, done: Round) -> None:
        if self.tokens == 0:
            self.seconds_to_first = self.seconds
        self.tokens += len(done.tokens)
        if not done.drafted:
            return
        self.rounds += 1
        self.round_tokens += len(done.tokens)
        missing = done.drafted - len(self.tried)
        self.tried += [0] * missing
        self.kept += [0] * missing
        refused = done.accepted < min(len(done.tokens), done.drafted)
        for i in range(done.accepted + refused):
            self.tried[i] += 1
            self.kept[i] += i < done.accepted

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round with drafts, the target's own token included."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share kept of the drafts at position 1 … k after their predecessors were."""
        return [
            kept / tried if tried else 0.0
            for kept, tried in zip(self.kept, self.tried, strict=True)
        ]

    @property
    def survival_by_position(self) -> list[float]:
        """Share of all rounds that kept the drafts up to position 1 … k."""
        return [kept / self.rounds for kept in self.kept]

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all time, the prompt's pass included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time after the first."""
        seconds = self.seconds - self.seconds_to_first
        return (self.tokens - 1) / seconds if self.tokens > 1 else 0.0
