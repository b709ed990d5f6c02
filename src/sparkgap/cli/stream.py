# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Tokens → text as it comes, with the drafted tokens marked.

A token need not be a whole character, and some tokenizers decide about a space by what
stands before it. So the text of a token is what it adds to the decoding of the tokens
around it, and a token that leaves a character open adds nothing: the token that closes
the character adds all of it. The pieces put together are the whole text.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sparkgap.cli.options import Mark

if TYPE_CHECKING:
    from sparkgap.speculate.generate import Round

# What tokenizers decode an unfinished character to.
OPEN = "\ufffd"
# Tokens of the prompt that the first new ones are decoded behind.
BEFORE = 5

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Token:
    """One token put out: its id, what it adds to the text, and who proposed it."""

    id: int
    text: str
    drafted: bool


class Detokenizer:
    """Text of a growing sequence, piece by piece.

    _ids[:_known] are the tokens of the piece before, whose text is out already.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-BEFORE:])
        self._known = len(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain now that `token` follows."""
        self._ids.append(token)
        return self._piece(finished=False)

    def finish(self) -> str:
        """What an unfinished last character looks like."""
        return self._piece(finished=True)

    def _piece(self, finished: bool) -> str:
        before = self._decode(self._ids[: self._known])
        now = self._decode(self._ids)
        if now.endswith(OPEN) and not finished:
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Writer:
    """Writes tokens to a console as they come."""

    def __init__(self, console: Console, mark: Mark) -> None:
        self._console = console
        if mark is Mark.auto:
            mark = _suited(console)
        self._styles = {Mark.colour: "green", Mark.underline: "underline"}
        self._mark = mark
        self._inside = False

    def write(self, text: str, drafted: bool) -> None:
        if not text:
            return
        if self._console.is_terminal:
            # A model may say anything; a terminal must not act on it.
            text = _CONTROL.sub(OPEN, text)
        if self._mark is Mark.brackets:
            text = self._bracketed(text, drafted)
        style = self._styles.get(self._mark) if drafted else None
        self._console.out(text, style=style, highlight=False, end="")

    def end(self) -> None:
        self._console.out("⟩" if self._inside else "", highlight=False)

    def _bracketed(self, text: str, drafted: bool) -> str:
        if drafted == self._inside:
            return text
        self._inside = drafted
        if not drafted:
            return "⟩" + text
        space = text[: len(text) - len(text.lstrip())]
        return f"{space}⟨{text[len(space) :]}"


def _suited(console: Console) -> Mark:
    """Colour on a terminal that has it, else underlining; nothing in a pipe or file."""
    if not console.is_terminal:
        return Mark.none
    coloured = console.color_system is not None and not console.no_color
    return Mark.colour if coloured else Mark.underline


def stream(
    rounds: "Iterable[Round]", detokenizer: Detokenizer, writer: Writer | None
) -> list[Token]:
    """Consume rounds, writing (with a writer) what is certain after each token."""
    tokens: list[Token] = []
    try:
        for done in rounds:
            for index, token in enumerate(done.tokens):
                drafted = index < done.accepted
                tokens.append(Token(token, detokenizer.push(token), drafted))
                if writer is not None:
                    writer.write(tokens[-1].text, drafted)
        if tokens and (rest := detokenizer.finish()):
            last = tokens[-1]
            tokens[-1] = Token(last.id, last.text + rest, last.drafted)
            if writer is not None:
                writer.write(rest, last.drafted)
    finally:
        if writer is not None:
            writer.end()
    return tokens
