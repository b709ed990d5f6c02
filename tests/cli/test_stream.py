# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Text as it comes: the pieces are the whole, no character is cut, marks are right."""

import io

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sparkgap.cli.options import Mark
from sparkgap.cli.stream import Detokenizer, Token, Writer, stream
from sparkgap.speculate.generate import Round

TEXTS = (
    "plain words",
    "Grüße, naïve café — ‘quotes’",
    "日本語のテキスト 🎉 and 👩‍👩‍👧",
    "  two  spaces\n\n\ttabs and\nlines ",
)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny.target)


class Sentences:
    """Decodes as SentencePiece does: the space before a first word is left out."""

    words = ("▁one", "▁two", "▁three", "!")

    def decode(self, ids, **_options):
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_are_the_whole_and_no_character_is_cut(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())  # a token is a byte here
    pieces = Detokenizer(tokenizer, [])
    got = [pieces.push(token) for token in ids]
    assert "".join(got) == text
    assert [piece for piece in got if piece] == list(text)
    assert pieces.finish() == ""


def test_an_unfinished_character_shows_at_the_end(tokenizer):
    *first, _last = tokenizer("ab€")["input_ids"]
    pieces = Detokenizer(tokenizer, [])
    assert [pieces.push(token) for token in first] == ["a", "b", "", ""]
    assert pieces.finish() == "\ufffd"


def test_broken_bytes_do_not_hold_up_what_follows(tokenizer):
    broken = tokenizer("€")["input_ids"][:1]
    pieces = Detokenizer(tokenizer, [])
    got = [pieces.push(token) for token in [*broken, *tokenizer("ok")["input_ids"]]]
    assert "".join(got) == "\ufffdok"


def test_special_tokens_have_no_text(tokenizer):
    pieces = Detokenizer(tokenizer, [])
    end = tokenizer.eos_token_id
    got = [pieces.push(token) for token in (*tokenizer("a")["input_ids"], end)]
    assert got == ["a", ""]


def test_the_space_between_prompt_and_text_is_kept():
    pieces = Detokenizer(Sentences(), [0])
    assert [pieces.push(token) for token in (1, 2, 3)] == [" two", " three", "!"]


ROUNDS = (Round((97,), 0, 0), Round((32, 98, 99), 2, 4), Round((100, 101), 1, 4))


def shown(mark, tokenizer, **console):
    file = io.StringIO()
    writer = Writer(Console(file=file, highlight=False, **console), mark)
    rounds = [
        Round(
            tuple(tokenizer(chr(c))["input_ids"][0] for c in done.tokens),
            done.accepted,
            done.drafted,
        )
        for done in ROUNDS
    ]
    tokens = stream(rounds, Detokenizer(tokenizer, []), writer)
    return file.getvalue(), tokens


def test_tokens_know_who_proposed_them(tokenizer):
    text, tokens = shown(Mark.none, tokenizer)
    assert text == "a bcde\n"
    assert [token.text for token in tokens if token.drafted] == [" ", "b", "d"]
    assert isinstance(tokens[0], Token)


def test_brackets(tokenizer):
    assert shown(Mark.brackets, tokenizer)[0] == "a ⟨b⟩c⟨d⟩e\n"


@pytest.mark.parametrize(
    ("console", "mark"),
    [
        ({"force_terminal": True, "color_system": "256"}, Mark.colour),
        ({"force_terminal": True, "color_system": None}, Mark.underline),
        (
            {"force_terminal": True, "color_system": "256", "no_color": True},
            Mark.underline,
        ),
        ({"force_terminal": False}, Mark.none),
    ],
    ids=["colours", "none", "NO_COLOR", "pipe"],
)
def test_auto_is_what_the_terminal_can(tokenizer, console, mark):
    assert (
        shown(Mark.auto, tokenizer, **console)[0]
        == (shown(mark, tokenizer, **console)[0])
    )


def test_a_terminal_is_not_controlled_by_the_model():
    file = io.StringIO()
    writer = Writer(Console(file=file, force_terminal=True), Mark.none)
    writer.write("a\x1b]0;title\x07b\n", drafted=False)
    assert file.getvalue() == "a\ufffd]0;title\ufffdb\n"
