# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Speculative decoding against plain decoding and transformers' own generate.

Each prompt is continued three ways, one after the other in one process, and the order
turns from prompt to prompt, so that a machine that slows down slows all three. A speed
is all tokens over all the time that produced them, the prompt's pass included, because
that is what can be measured of transformers. All three are warmed up first: the pass
that packs the target's weights for a block's rows belongs to loading.

The text must be the target's own. Where it is not, greedily, the difference says
whether it is a tie: how far apart the two tokens are in the target's fp32 logits.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkgap.bench.prompts import HELD_OUT
from sparkgap.drafter import Drafter
from sparkgap.speculate.generate import Statistics, decode_plain, generate
from sparkgap.speculate.target import Target
from sparkgap.speculate.verify import GREEDY_BELOW, Method

# Passes over one row and over a block's rows sum in different orders; logits closer
# than this may change places.
TIE = 1e-4

WARM_UP_TOKENS = 24
WAYS = ("plain", "speculative", "transformers")


@dataclass(frozen=True)
class Settings:
    """How every prompt is continued."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    method: Method = "block"

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Run:
    """One continuation: its tokens and the seconds that made them."""

    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Difference:
    """The first step where a text leaves the plain one.

    ours, plain: the tokens there, None behind a text's end; margin: the target's logit
    of the plain token less that of ours, None where one text just ends.
    """

    step: int
    ours: int | None
    plain: int | None
    margin: float | None

    @property
    def is_tie(self) -> bool:
        return self.margin is not None and abs(self.margin) <= TIE


@dataclass(frozen=True)
class Row:
    """One prompt, three ways. rounds, round_tokens: as `Statistics` counts them."""

    kind: str
    prompt: str
    plain: Run
    speculative: Run
    transformers: Run
    rounds: int
    round_tokens: int
    acceptance_by_position: tuple[float, ...]
    difference: Difference | None
    transformers_identical: bool

    @property
    def speed_ratio(self) -> float:
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def plain_ratio(self) -> float:
        return self.plain.tokens_per_second / self.transformers.tokens_per_second


def held_out(count: int | None = None) -> list[tuple[str, str]]:
    """(kind, prompt) of the first `count` held-out prompts, the kinds in turn."""
    turns = zip(*HELD_OUT.values(), strict=True)
    kinds = list(HELD_OUT)
    return [pair for turn in turns for pair in zip(kinds, turn, strict=True)][:count]


def first_difference(
    target: Target,
    prompt_ids: Sequence[int],
    ours: Sequence[int],
    plain: Sequence[int],
) -> Difference | None:
    """Where two continuations part, judged by `target`; None when they are equal."""
    pairs = zip(ours, plain, strict=False)
    shorter = min(len(ours), len(plain))
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if step == len(ours) == len(plain):
        return None
    if step == shorter:
        rest = [next(iter(tokens[step:]), None) for tokens in (ours, plain)]
        return Difference(step, rest[0], rest[1], None)
    logits, _ = target.open().forward([*prompt_ids, *plain[:step]], 1)
    margin = float(logits[0, plain[step]] - logits[0, ours[step]])
    return Difference(step, ours[step], plain[step], margin)


class Bench:
    """Target and drafter, and the same model as transformers loads it.

    stock: a second copy of the model, untouched: `Target` packs the weights of its own.
    judge: gives the target in fp32 when a difference is to be explained.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        stock: Any,
        judge: Callable[[], Target],
        settings: Settings,
    ) -> None:
        self.target, self.drafter, self.stock = target, drafter, stock
        self.judge, self.settings = judge, settings
        self._eos = target.eos_ids

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        for way in WAYS:
            self._run(way, prompt_ids, Statistics(), WARM_UP_TOKENS)

    def row(self, index: int, kind: str, prompt: str, prompt_ids: Sequence[int]) -> Row:
        """Continue prompt number `index` three ways."""
        turn = index % len(WAYS)
        counts = Statistics()
        runs = {
            way: self._run(way, prompt_ids, counts, self.settings.max_new_tokens)
            for way in WAYS[turn:] + WAYS[:turn]
        }
        plain, ours = runs["plain"].tokens, runs["speculative"].tokens
        difference = None
        if self.settings.greedy and ours != plain:
            difference = first_difference(self.judge(), prompt_ids, ours, plain)
        return Row(
            kind,
            prompt,
            rounds=counts.rounds,
            round_tokens=counts.round_tokens,
            acceptance_by_position=tuple(counts.acceptance_by_position),
            difference=difference,
            transformers_identical=runs["transformers"].tokens == plain,
            **runs,
        )

    def _run(
        self, way: str, prompt_ids: Sequence[int], counts: Statistics, limit: int
    ) -> Run:
        if way == "transformers":
            return self._transformers(prompt_ids, limit)
        s = self.settings
        started = time.perf_counter()
        if way == "plain":
            tokens = list(
                decode_plain(
                    self.target,
                    prompt_ids,
                    max_new_tokens=limit,
                    temperature=s.temperature,
                    seed=s.seed,
                    eos_ids=self._eos,
                )
            )
            return Run(tuple(tokens), time.perf_counter() - started)
        rounds = generate(
            self.target,
            self.drafter,
            prompt_ids,
            max_new_tokens=limit,
            temperature=s.temperature,
            seed=s.seed,
            eos_ids=self._eos,
            method=s.method,
        )
        tokens = [token for done in counts.watch(rounds) for token in done.tokens]
        return Run(tuple(tokens), time.perf_counter() - started)

    def _transformers(self, prompt_ids: Sequence[int], limit: int) -> Run:
        from transformers import GenerationConfig

        s = self.settings
        sampling = {} if s.greedy else {"temperature": s.temperature, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=limit,
            do_sample=not s.greedy,
            eos_token_id=list(self._eos),
            pad_token_id=self._eos[0] if self._eos else None,
            **sampling,
        )
        torch.manual_seed(s.seed)
        started = time.perf_counter()
        ids = torch.tensor([list(prompt_ids)])
        made = self.stock.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        tokens = made[0, len(prompt_ids) :].tolist()
        return Run(tuple(tokens), time.perf_counter() - started)


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of one figure over the prompts."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(*[values[0]] * 5)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """What the rows amount to.

    accepted_length: tokens a round over all rounds, the target's own included; speeds:
    tokens/s by way; ties: differences that are ties, of `differing` ones; both
    `identical` are None at a temperature, where texts are draws.
    """

    prompts: int
    identical: int | None
    differing: int
    ties: int
    accepted_length: float
    accepted_length_by_kind: dict[str, float]
    speeds: dict[str, Spread]
    speculative_to_plain: Spread
    plain_to_transformers: Spread
    transformers_identical: int | None

    @classmethod
    def of(cls, rows: Sequence[Row], greedy: bool) -> "Summary":
        differences = [row.difference for row in rows if row.difference is not None]
        kinds = dict.fromkeys(row.kind for row in rows)
        return cls(
            prompts=len(rows),
            identical=len(rows) - len(differences) if greedy else None,
            differing=len(differences),
            ties=sum(difference.is_tie for difference in differences),
            accepted_length=_accepted_length(rows),
            accepted_length_by_kind={
                kind: _accepted_length([row for row in rows if row.kind == kind])
                for kind in kinds
            },
            speeds={
                way: Spread.of([getattr(row, way).tokens_per_second for row in rows])
                for way in WAYS
            },
            speculative_to_plain=Spread.of([row.speed_ratio for row in rows]),
            plain_to_transformers=Spread.of([row.plain_ratio for row in rows]),
            transformers_identical=(
                sum(row.transformers_identical for row in rows) if greedy else None
            ),
        )


def _accepted_length(rows: Sequence[Row]) -> float:
    rounds = sum(row.rounds for row in rows)
    return sum(row.round_tokens for row in rows) / rounds if rounds else 0.0
