# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""A target and a drafter of a few tokens, which check what the loop does with them.

The toy target's next token depends on the last two tokens alone. Its taps are
[n, 1, 2]: each row's token and position, so that the toy drafter can read back what it
was given as context and refuse what is lost, doubled, shifted or left of a rejection.
"""

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from sparkgap.speculate.verify import draw


def table(vocab, seed, size=1.5):
    """Logits [V, V, V] after (second last, last) token."""
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(vocab, vocab, vocab, generator=generator)


def _noise(seed, position):
    # Hashed: near seeds of this generator give first numbers that go together, enough
    # for 4,000 texts to fail a chi-square (p = 9e-5) that they pass with this.
    digest = hashlib.sha256(f"toy draft {seed} {position}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


class ToyTarget:
    def __init__(self, logits, max_length=64):
        self.logits = logits
        self.max_length = max_length
        self.vocab_size = logits.shape[0]
        self.passes = []

    def prepare(self, rows):
        self.prepared = rows

    def open(self, taps=()):
        assert tuple(taps) in ((), (0,))
        return ToySequence(self)

    def after(self, text):
        return self.logits[text[-2] if len(text) > 1 else 0, text[-1]]


class ToySequence:
    def __init__(self, target):
        self.target, self.ids = target, []

    def forward(self, ids, rows):
        start = len(self.ids)
        self.ids += list(ids)
        assert len(self.ids) <= self.target.max_length
        self.target.passes.append(len(ids))
        ends = range(len(self.ids) - rows + 1, len(self.ids) + 1)
        logits = torch.stack([self.target.after(self.ids[:end]) for end in ends])
        positions = torch.arange(start, len(self.ids))
        taps = torch.stack([torch.tensor(self.ids[start:]), positions], dim=1)
        return logits.float(), taps[:, None].float()

    def crop(self, length):
        assert 0 < length <= len(self.ids)
        del self.ids[length:]


@dataclass
class ToyDrafter:
    """Drafts from `logits`, a table like the target's; `spoil(position)` says where a
    greedy draft is wrong on purpose."""

    logits: torch.Tensor
    k: int = 4
    max_model_len: int = 1000
    spoil: object = lambda _position: False
    d2t: torch.Tensor | None = None
    texts: dict = field(default_factory=dict)
    released: list = field(default_factory=list)

    config = SimpleNamespace(target_layer_ids=(0,))

    @property
    def num_drafts(self):
        return self.k

    def slots(self, request, positions):
        text = self.texts.setdefault(request, [])
        assert positions.tolist() == list(range(len(text), len(text) + len(positions)))
        return positions

    def add_context(self, hidden, positions, slots):
        assert hidden.shape == (len(positions), 1, 2)
        assert torch.equal(positions, slots)
        assert torch.equal(hidden[:, 0, 1].long(), positions)
        (text,) = self.texts.values()
        text += hidden[:, 0, 0].long().tolist()

    def propose(self, batch, *, return_logits=True):
        (request,), (anchor,) = batch.requests, batch.anchors.tolist()
        (position,), (seed,) = batch.positions.tolist(), batch.seeds.tolist()
        (temperature,) = batch.temperatures.tolist()
        text = [*self.texts[request], anchor]
        assert position == len(text) - 1, "context must end before the anchor"
        noise = _noise(seed, position)
        tokens, rows = [], []
        for _ in range(self.k):
            row = self.logits[text[-2] if len(text) > 1 else 0, text[-1]]
            if temperature > 0:
                weights = torch.softmax(row.float() / temperature, -1)
                uniform = torch.rand(1, dtype=torch.float64, generator=noise)
                token = int(draw(weights[None], uniform))
            else:
                token = int(row.argmax())
                token = (token + 1) % len(row) if self.spoil(len(text)) else token
            rows.append(row)
            token += int(self.d2t[token]) if self.d2t is not None else 0
            tokens.append(token)
            text.append(token)
        logits = torch.stack(rows)[None] if return_logits else None
        return SimpleNamespace(tokens=torch.tensor([tokens]), logits=logits)

    def release(self, request):
        self.texts.pop(request, None)
        self.released.append(request)
