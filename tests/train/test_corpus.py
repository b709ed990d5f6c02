# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Conversations: who said what, where turns begin, what may be learned from."""

import re
from pathlib import Path

import pytest
import torch

from sparkgap.bench.prompts import HELD_OUT
from sparkgap.errors import InputError
from sparkgap.speculate.target import Target
from sparkgap.train.corpus import Corpus, CorpusPlan, Turns, generate_corpus
from sparkgap.train.prompts import (
    FUNCTIONS,
    LANGUAGES,
    PEOPLE,
    PLACES,
    SENTENCES,
    TEMPLATES,
    TOPICS,
    sample_prompts,
)
from train.conftest import PLAN

START, END = 256, 257


def test_turns_are_the_templates(target: Target) -> None:
    turns = Turns.of(target.tokenizer)
    decode = target.tokenizer.decode
    assert decode(turns.prefix) == "<|start|>user\n"
    assert decode(turns.after_user) == "<|end|>\n<|start|>assistant\n"
    assert decode(turns.next_user) == "\n<|start|>user\n"
    assert turns.end == END


def test_turns_without_a_template_are_paragraphs(target: Target) -> None:
    target.tokenizer.chat_template = None
    turns = Turns.of(target.tokenizer)
    assert turns.prefix == (START,)
    assert turns.after_user == ()
    assert target.tokenizer.decode(turns.next_user) == "\n\n"


def test_turns_need_an_end(target: Target) -> None:
    target.tokenizer.eos_token = None
    with pytest.raises(InputError, match="eos_token"):
        Turns.of(target.tokenizer)


def replies(corpus: Corpus, row: int) -> list[list[int]]:
    """Stretches of natural tokens of a row."""
    marks = "".join("x" if n else "." for n in corpus.natural[row])
    tokens = corpus.tokens[row].tolist()
    return [tokens[m.start() : m.end()] for m in re.finditer("x+", marks)]


def test_queued_tokens_stand_word_for_word(corpus: Corpus, target: Target) -> None:
    prompts = "Hi there|1\\+1\\?|Tell me"
    for row in range(len(corpus.tokens)):
        live = corpus.natural[row]
        said = [int(t) for t, n in zip(corpus.tokens[row], live, strict=True) if not n]
        text = target.tokenizer.decode(said)
        turn = f"(<\\|end\\|>)?\\n?<\\|start\\|>user\n({prompts})"
        header = "<\\|end\\|>\n<\\|start\\|>assistant\n"
        # The last turn may be cut off at the end of the row.
        last = text.rfind("<|start|>user\n")
        assert re.fullmatch(f"({turn}{header})*", text[:last].removesuffix("\n")) or (
            re.match(f"({turn}{header})+", text)
        )


def test_an_answer_is_the_targets_own_greedy_text(folder: Path) -> None:
    target = Target.from_pretrained(folder)
    plan = CorpusPlan(batches=1, rows=2, length=96, answer_cap=9, temperatures=(0.0,))
    corpus = generate_corpus(target, plan, prompts=["What now?"])
    for row in range(2):
        logits = target.model(corpus.tokens[row][None].long()).logits[0]
        natural = corpus.natural[row].nonzero()[:, 0]
        assert natural.numel() >= 9
        best = logits.argmax(-1)[natural - 1]
        assert torch.equal(best, corpus.tokens[row][natural].long())


def test_long_answers_are_ended_and_the_end_is_not_natural(corpus: Corpus) -> None:
    found = [
        reply for row in range(len(corpus.tokens)) for reply in replies(corpus, row)
    ]
    assert max(map(len, found)) == PLAN.answer_cap
    for row in range(len(corpus.tokens)):
        tokens, natural = corpus.tokens[row], corpus.natural[row]
        for at in range(1, len(tokens)):
            ended = tokens[at] == END and natural[at]
            assert not (ended and at + 1 < len(tokens) and natural[at + 1])


def test_same_seed_same_corpus(folder: Path, corpus: Corpus) -> None:
    prompts = ["Hi there", "1+1?", "Tell me"]
    again = generate_corpus(Target.from_pretrained(folder), PLAN, prompts=prompts)
    assert torch.equal(again.tokens, corpus.tokens)
    assert torch.equal(again.natural, corpus.natural)


def test_invented_turns_are_the_targets_words(folder: Path) -> None:
    plan = CorpusPlan(batches=1, rows=8, length=128, answer_cap=8, invented=0.5)
    stages: list[str] = []
    corpus = generate_corpus(
        Target.from_pretrained(folder), plan, lambda stage, _share: stages.append(stage)
    )
    assert "inventing user turns" in stages
    assert corpus.tokens.shape == (8, 128)
    assert corpus.natural.any()


def test_corpus_survives_its_file(tmp_path: Path, corpus: Corpus) -> None:
    corpus.save(tmp_path / "c.safetensors")
    again = Corpus.load(tmp_path / "c.safetensors")
    assert torch.equal(again.tokens, corpus.tokens)
    assert torch.equal(again.natural, corpus.natural)


def test_held_out_prompts_are_not_in_the_training_data() -> None:
    held = {prompt for kind in HELD_OUT.values() for prompt in kind}
    assert len(held) == 48
    assert set(HELD_OUT) == set(TEMPLATES)
    draw = sample_prompts(0)
    assert not held & {next(draw) for _ in range(20000)}
    for sentence in SENTENCES:
        assert not any(sentence in prompt for prompt in held)
    # No template, however its fields are filled, gives a held-out prompt.
    fields = {
        "topic": TOPICS,
        "other": TOPICS,
        "person": PEOPLE,
        "person2": PEOPLE,
        "place": PLACES,
        "function": FUNCTIONS,
        "language": LANGUAGES,
        "sentence": SENTENCES,
    }
    for template in (t for kind in TEMPLATES.values() for t in kind):
        pattern = re.escape(template)
        for field, values in fields.items():
            options = "|".join(map(re.escape, values))
            pattern = pattern.replace(re.escape("{" + field + "}"), f"(?:{options})")
        pattern = re.sub(r"\\{[abcd]\\}", r"\\d+", pattern)
        assert not [p for p in held if re.fullmatch(pattern, p)], template
