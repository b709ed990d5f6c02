# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Training sequences: conversations that the target has with a queue of user turns.

Every row of a batch starts from the same template prefix and all rows stand at the same
position, so there is no padding, no mask and no separate prefill: user turns and turn
headers are queued tokens that replace what was sampled, and an end-of-turn token queues
the next turn. Measured on an H200 this makes 2048 × 512 tokens in seconds.

    tokens [N, S] int32     the sequences
    natural [N, S] bool     tokens the target itself chose in an answer; queued tokens
                            and the end forced on a capped answer are not
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkgap.errors import InputError
from sparkgap.speculate.target import Target
from sparkgap.speculate.target_cache import TargetCache
from sparkgap.train.prompts import sample_prompts

Progress = Callable[[str, float], None]
"""Called with a stage's name and the share of it that is done."""

MAX_TURN = 96
INVENTED_TURN = 48
INVENTED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Corpus:
    """tokens [N, S] int32, natural [N, S] bool, on one device."""

    tokens: Tensor
    natural: Tensor

    def save(self, path: Path) -> None:
        """Write to a safetensors file (under a temporary name, then renamed)."""
        half = path.with_suffix(".part")
        save_file(
            {"tokens": self.tokens, "natural": self.natural.to(torch.uint8)}, half
        )
        half.replace(path)

    @classmethod
    def load(cls, path: Path, device: str | torch.device = "cpu") -> "Corpus":
        held = load_file(path, device=str(device))
        return cls(held["tokens"], held["natural"].bool())


@dataclass(frozen=True)
class Turns:
    """Token pieces around the turns of a chat.

    prefix: everything before the first user text; after_user: from the user's text to
    the answer; next_user: from an answer's end token (not included) to the next user
    text; end: the token that ends an answer.
    """

    prefix: tuple[int, ...]
    after_user: tuple[int, ...]
    next_user: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> "Turns":
        """Pieces of the tokenizer's chat template; without one, plain paragraphs."""
        end = tokenizer.eos_token_id
        if end is None:
            raise InputError(
                "the tokenizer names no eos_token, so answers would have no end: set "
                "it in tokenizer_config.json"
            )

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        if tokenizer.chat_template is None:
            start = tokenizer.bos_token_id
            return cls((end if start is None else start,), (), ids("\n\n"), end)
        user, answer, again = "<<user>>", "<<answer>>", "<<again>>"
        said = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": again},
        ]

        def render(messages: list[dict[str, str]]) -> str:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            return text

        prefix, after = render(said[:1]).split(user)
        between = render(said).split(answer)[1].split(again)[0]
        return cls(
            ids(prefix), ids(after), ids(between.removeprefix(tokenizer.eos_token)), end
        )


@dataclass(frozen=True)
class CorpusPlan:
    """How much to generate and how.

    batches × rows sequences of `length` tokens; an answer longer than `answer_cap` is
    ended by force; each turn draws one of `temperatures`; a share `invented` of the
    user turns is the target's own.
    """

    batches: int
    rows: int
    length: int = 512
    answer_cap: int = 200
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7, 0.7, 1.0, 1.0)
    invented: float = 0.4
    seed: int = 0


@torch.inference_mode()
def generate_corpus(
    target: Target,
    plan: CorpusPlan,
    progress: Progress = lambda _stage, _share: None,
    prompts: Sequence[str] | None = None,
) -> Corpus:
    """Let the target answer; prompts None = the training ones."""
    turns = Turns.of(target.tokenizer)
    maker = _Maker(target, turns, plan)
    asked = prompts or _training_prompts(plan)
    pool = _user_turns(target.tokenizer, turns, asked)
    if prompts is None and plan.invented > 0:
        progress("inventing user turns", 0.0)
        invented = maker.invent(round(len(pool) * plan.invented / (1 - plan.invented)))
        pool += invented
    batches = []
    for index in range(plan.batches):
        batches.append(
            maker.converse(
                pool,
                lambda share, done=index: progress(  # type: ignore[misc]
                    "generating", (done + share) / plan.batches
                ),
            )
        )
    return Corpus(
        torch.cat([b.tokens for b in batches]), torch.cat([b.natural for b in batches])
    )


def _training_prompts(plan: CorpusPlan) -> list[str]:
    """About as many prompts as there will be turns."""
    count = plan.batches * plan.rows * 3
    drawn: Iterator[str] = sample_prompts(plan.seed)
    return list(islice(drawn, max(count, 64)))


def _user_turns(
    tokenizer: Any, turns: Turns, prompts: Sequence[str]
) -> list[tuple[int, ...]]:
    encoded = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    return [
        tuple(ids) + turns.after_user
        for ids in encoded
        if 0 < len(ids) <= MAX_TURN - len(turns.after_user) - len(turns.next_user)
    ]


class _Maker:
    """Runs the target over a batch of rows, one position at a time."""

    def __init__(self, target: Target, turns: Turns, plan: CorpusPlan) -> None:
        self.target, self.turns, self.plan = target, turns, plan
        self.device = target.device
        self.draw = torch.Generator(self.device).manual_seed(plan.seed)

    def invent(self, count: int) -> list[tuple[int, ...]]:
        """User turns that the target itself writes after a user header."""
        found: list[tuple[int, ...]] = []
        rows = self.plan.rows
        after = self.turns.after_user
        hot = torch.full((rows,), INVENTED_TEMPERATURE, device=self.device)
        # Rows that do not end in time are lost; a target may never end: 8 tries.
        for _ in range(8):
            if len(found) >= count:
                break
            tokens = self._start(rows, INVENTED_TURN)
            cache = TargetCache(len(self.target.layers))
            at = len(self.turns.prefix)
            logits = self._forward(tokens[:, :at], cache)
            for position in range(at, tokens.shape[1]):
                tokens[:, position] = self._choose(logits, hot)
                logits = self._forward(tokens[:, position : position + 1], cache)
            for row in tokens[:, at:].tolist():
                if self.turns.end in row[3:]:
                    found.append(tuple(row[: row.index(self.turns.end)]) + after)
        return found[:count]

    def converse(
        self, pool: list[tuple[int, ...]], progress: Callable[[float], None]
    ) -> Corpus:
        """One batch of rows, from the template's prefix to plan.length tokens."""
        plan, end = self.plan, self.turns.end
        state = _Rows(self, pool)
        tokens = self._start(plan.rows, plan.length - len(self.turns.prefix))
        natural = torch.zeros_like(tokens, dtype=torch.bool)
        cache = TargetCache(len(self.target.layers))
        at = len(self.turns.prefix)
        logits = self._forward(tokens[:, :at], cache)
        for position in range(at, plan.length):
            chosen = self._choose(logits, state.temperatures)
            queued = state.queue[:, position]
            token = torch.where(queued >= 0, queued, chosen)
            tokens[:, position] = token
            natural[:, position] = (queued < 0) & (position > state.turn_end)
            state.advance(position, token, end)
            if position + 1 < plan.length:
                logits = self._forward(tokens[:, position : position + 1], cache)
            if position % 32 == 0:
                progress(position / plan.length)
        return Corpus(tokens.int(), natural)

    def _start(self, rows: int, more: int) -> Tensor:
        prefix = torch.tensor(self.turns.prefix, device=self.device)
        tokens = torch.zeros(
            rows, len(prefix) + more, dtype=torch.int64, device=self.device
        )
        tokens[:, : len(prefix)] = prefix
        return tokens

    def _forward(self, ids: Tensor, cache: TargetCache) -> Tensor:
        """Logits [B, V] of the last position of ids [B, n]."""
        return self.target.call(ids, cache, 1)[:, 0]

    def _choose(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Tokens [B] drawn at each row's temperature (Gumbel; 0 is the argmax)."""
        noise = torch.empty_like(logits).exponential_(generator=self.draw).log_().neg_()
        return noise.mul_(temperatures[:, None]).add_(logits).argmax(-1)


class _Rows:
    """What each row of a batch is in the middle of; all of it stays on the device.

    queue [B, S]: token that replaces the sampled one, -1 = none; turn_end [B]: position
    of the last queued token of the user's turn; answered [B]: tokens of the answer so
    far; temperatures [B].
    """

    def __init__(self, maker: _Maker, pool: list[tuple[int, ...]]) -> None:
        plan, device = maker.plan, maker.device
        self.plan, self.draw = plan, maker.draw
        between = maker.turns.next_user
        width = max(len(turn) for turn in pool) + len(between)
        # Every turn stands in the pool with the piece that follows an earlier answer.
        rows = [list(between + turn) for turn in pool]
        self.pool = torch.tensor(
            [row + [-1] * (width - len(row)) for row in rows], device=device
        )
        self.lengths = (self.pool >= 0).sum(1)
        self.queue = torch.full((plan.rows, plan.length + width), -1, device=device)
        self.turn_end = torch.zeros(plan.rows, dtype=torch.int64, device=device)
        self.answered = torch.zeros_like(self.turn_end)
        self.hot = torch.tensor(plan.temperatures, device=device)
        self.temperatures = torch.zeros(plan.rows, device=device)
        every = torch.ones(plan.rows, dtype=torch.bool, device=device)
        self._begin_turns(every, len(maker.turns.prefix), skip=len(between))

    def advance(self, position: int, token: Tensor, end: int) -> None:
        """Take in the tokens [B] that now stand at `position`."""
        answering = position > self.turn_end
        self.answered = torch.where(answering, self.answered + 1, 0)
        capped = answering & (self.answered >= self.plan.answer_cap) & (token != end)
        column = self.queue[:, position + 1]
        column.copy_(torch.where(capped, end, column))
        self._begin_turns(answering & (token == end), position + 1)

    def _begin_turns(self, rows: Tensor, at: int, skip: int = 0) -> None:
        """Queue a random user turn from column `at` for the rows [B] that are set."""
        count = len(rows)
        picked = torch.randint(
            len(self.pool), (count,), device=rows.device, generator=self.draw
        )
        turn = self.pool[picked, skip:]
        window = self.queue[:, at : at + turn.shape[1]]
        turn = turn[:, : window.shape[1]]
        window.copy_(torch.where(rows[:, None] & (turn >= 0), turn, window))
        ends = at + self.lengths[picked] - skip - 1
        self.turn_end = torch.where(rows, ends, self.turn_end)
        hot = self.hot[
            torch.randint(
                len(self.hot), (count,), device=rows.device, generator=self.draw
            )
        ]
        self.temperatures = torch.where(rows, hot, self.temperatures)
