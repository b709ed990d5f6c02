# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The engine-free drafter: what a request drafts depends on that request alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkgap.checkpoint import save_checkpoint
from sparkgap.config import DraftConfig
from sparkgap.drafter import DraftBatch, Drafter
from sparkgap.errors import InputError
from sparkgap.model import Block, Buffers, Draft, DraftModel, step
from sparkgap.ops.markov_sample import Sampling
from sparkgap.ops.mla_decode import Extent
from sparkgap.primitives import packed
from sparkgap.verify.tolerance import STEP_BF16, relative_error
from sparkgap.weights import DraftWeights, random_weights
from tiny import draft_config

MAX_LEN = 200


def make(**changes: object) -> Drafter:
    config = DraftConfig.from_dict(draft_config(**changes), name="tiny")
    return Drafter(
        config, random_weights(config), max_requests=4, max_model_len=MAX_LEN
    )


def taps(seed: int, rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, 32, generator=draw)


def feed(drafter: Drafter, request: str, hidden: Tensor, start: int = 0) -> None:
    positions = torch.arange(start, start + len(hidden))
    drafter.add_context(hidden, positions, drafter.slots(request, positions))


def batch(**requests: tuple[int, int, float, int]) -> DraftBatch:
    """name=(anchor, position, temperature, seed)."""
    anchors, positions, heat, seeds = zip(*requests.values(), strict=True)
    return DraftBatch(
        list(requests),
        torch.tensor(anchors),
        torch.tensor(positions),
        torch.tensor(heat),
        torch.tensor(seeds),
    )


def same(a: Draft, b: Draft, rows: Any = slice(None)) -> None:
    assert torch.equal(a.tokens, b.tokens[rows])
    for mine, other in ((a.logits, b.logits), (a.confidence, b.confidence)):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other[rows], rtol=1e-4, atol=1e-4)


THREE = {"a": (5, 90, 0.0, 1), "b": (9, 1, 1.0, 2), "c": (7, 64, 0.7, 3)}


def fed() -> Drafter:
    drafter = make()
    for seed, (name, (_, position, _, _)) in enumerate(THREE.items()):
        feed(drafter, name, taps(seed, position))
    return drafter


def test_order_and_company_do_not_matter() -> None:
    drafter = fed()
    together = drafter.propose(batch(**THREE))
    for index, name in enumerate(THREE):
        same(drafter.propose(batch(**{name: THREE[name]})), together, [index])
    shuffled = {name: THREE[name] for name in ("c", "a", "b")}
    same(drafter.propose(batch(**shuffled)), together, [2, 0, 1])


def test_drafts_repeat_and_change_with_the_seed() -> None:
    drafter = fed()
    first = drafter.propose(batch(**THREE))
    same(drafter.propose(batch(**THREE)), first)
    other = {n: (a, p, 5.0, 77) for n, (a, p, _, _) in THREE.items()}
    assert not torch.equal(drafter.propose(batch(**other)).tokens, first.tokens)


def test_context_matters() -> None:
    one, other = make(), make()
    feed(one, "a", taps(0, 90))
    feed(other, "a", taps(8, 90))
    wanted = batch(a=THREE["a"])
    a, b = one.propose(wanted), other.propose(wanted)
    assert a.logits is not None
    assert b.logits is not None
    assert not torch.allclose(a.logits, b.logits, atol=1e-2)


def test_chunks_of_context_are_the_whole() -> None:
    whole, parts = make(), make()
    hidden = taps(0, 90)
    feed(whole, "a", hidden)
    for first, last in ((0, 1), (1, 64), (64, 65), (65, 90)):
        feed(parts, "a", hidden[first:last], first)
    same(parts.propose(batch(a=THREE["a"])), whole.propose(batch(a=THREE["a"])))


def test_rows_of_several_requests_may_be_mixed() -> None:
    apart, mixed = make(), make()
    one, two = taps(0, 90), taps(1, 64)
    feed(apart, "a", one)
    feed(apart, "c", two)
    positions = [torch.arange(90), torch.arange(64)]
    slots = [mixed.slots("a", positions[0]), mixed.slots("c", positions[1])]
    order = torch.randperm(154, generator=torch.Generator().manual_seed(0))
    everything = torch.cat([one, two])[order]
    mixed.add_context(everything, torch.cat(positions)[order], torch.cat(slots)[order])
    wanted = batch(a=THREE["a"], c=THREE["c"])
    same(mixed.propose(wanted), apart.propose(wanted))


def test_padding_slots_write_nothing() -> None:
    clean, padded = make(), make()
    hidden = taps(0, 90)
    feed(clean, "a", hidden)
    positions = torch.arange(90)
    slots = padded.slots("a", positions)
    poison = torch.full((3, 2, 32), torch.nan)
    padded.add_context(
        torch.cat([hidden, poison]),
        torch.cat([positions, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([slots, torch.full((3,), -1)]),
    )
    same(padded.propose(batch(a=THREE["a"])), clean.propose(batch(a=THREE["a"])))


def test_a_late_start_sees_what_is_there() -> None:
    """Rotary attention depends on distances alone, so a context of rows 40 to 89 equals
    one of rows 0 to 49 moved along with its anchor."""
    late, early = make(), make()
    hidden = taps(0, 50)
    feed(late, "a", hidden, start=40)
    feed(early, "a", hidden, start=0)
    moved = late.propose(batch(a=(5, 90, 0.0, 1)))
    plain = early.propose(batch(a=(5, 50, 0.0, 1)))
    assert moved.logits is not None
    torch.testing.assert_close(moved.logits, plain.logits, rtol=1e-3, atol=1e-3)


def test_going_back_forgets_what_lay_behind() -> None:
    straight, back = make(), make()
    kept, wrong, right = taps(0, 60), taps(1, 20), taps(2, 30)
    feed(back, "a", kept)
    feed(back, "a", wrong, start=60)
    feed(back, "a", right, start=60)
    feed(straight, "a", torch.cat([kept, right]))
    same(back.propose(batch(a=THREE["a"])), straight.propose(batch(a=THREE["a"])))


def test_reused_blocks_carry_nothing_over() -> None:
    used = make()
    for name in ("x", "y", "z"):
        feed(used, name, taps(ord(name), MAX_LEN))
    for layer in used.cache.layers:
        layer.fill_(torch.nan)
    for name in ("x", "y", "z"):
        used.release(name)
    feed(used, "a", taps(0, 90))
    fresh = make()
    feed(fresh, "a", taps(0, 90))
    same(used.propose(batch(a=THREE["a"])), fresh.propose(batch(a=THREE["a"])))


def test_no_requests_draft_nothing() -> None:
    drafter = make()
    empty = DraftBatch(
        [],
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.int64),
    )
    draft = drafter.propose(empty)
    assert draft.tokens.shape == (0, 4)
    drafter.add_context(taps(0, 0), empty.positions, empty.positions)


def test_an_anchor_without_context_drafts() -> None:
    draft = make().propose(batch(a=(5, 0, 0.0, 1)))
    assert draft.tokens.shape == (1, 4)
    assert bool(draft.confidence.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [1, 3, 4])
def test_nothing_past_the_model_length_is_attended(causal: bool, left: int) -> None:
    """Rows inside the length do not see the rows outside it: with `left` rows inside
    they draft as a block of `left` rows does."""
    position = MAX_LEN - left
    full = make(is_causal=causal)
    feed(full, "a", taps(0, position))
    draft = full.propose(batch(a=(5, position, 0.0, 1)))
    short = Drafter(
        full.config, full.model.weights, max_model_len=MAX_LEN, num_drafts=left
    )
    feed(short, "a", taps(0, position))
    want = short.propose(batch(a=(5, position, 0.0, 1)))
    assert draft.logits is not None
    assert want.logits is not None
    assert torch.equal(draft.tokens[:, :left], want.tokens)
    torch.testing.assert_close(draft.logits[:, :left], want.logits)
    assert draft.tokens.shape == (1, 4)


def test_fewer_drafts_are_a_narrower_block() -> None:
    wide = make()
    narrow = Drafter(
        wide.config, wide.model.weights, max_model_len=MAX_LEN, num_drafts=2
    )
    feed(narrow, "a", taps(0, 90))
    feed(wide, "a", taps(0, 90))
    assert narrow.num_drafts == 2
    two = narrow.propose(batch(a=THREE["a"]))
    four = wide.propose(batch(a=THREE["a"]))
    assert two.tokens.shape == (1, 2)
    assert two.logits is not None
    assert four.logits is not None
    # Every row of a non-causal block sees the whole block, so a narrower one differs.
    assert not torch.allclose(two.logits, four.logits[:, :2], atol=1e-4)


def test_step_is_the_stages_in_order() -> None:
    drafter = fed()
    want = drafter.propose(batch(**THREE))
    fresh = make()
    slots = [fresh.slots(n, torch.arange(p)) for n, (_, p, _, _) in THREE.items()]
    lens = [p for _, p, _, _ in THREE.values()]
    anchors = torch.tensor([a for a, _, _, _ in THREE.values()])
    starts = torch.tensor(lens)
    ids = torch.full((3, 4), fresh.config.mask_token_id)
    ids[:, 0] = anchors
    positions = starts[:, None] + torch.arange(4)
    buffers = Buffers(
        torch.cat([taps(i, n) for i, n in enumerate(lens)]),
        torch.cat([torch.arange(n) for n in lens]),
        torch.cat(slots),
        Block(
            ids,
            positions,
            fresh._tables.table(list(THREE)),
            Extent(starts, torch.full((3,), 4)),
        ),
        Sampling(
            torch.tensor([t for _, _, t, _ in THREE.values()]),
            torch.tensor([s for _, _, _, s in THREE.values()]),
            positions + 1,
        ),
        fresh.cache,
    )
    same(step(fresh.model, buffers), want)


def drop_embedding(weights: DraftWeights) -> DraftWeights:
    return replace(weights, embedding=None)


def narrow_head(weights: DraftWeights) -> DraftWeights:
    assert weights.lm_head is not None
    return replace(weights, lm_head=weights.lm_head[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [(drop_embedding, "holds no embedding"), (narrow_head, "lm_head is")],
)
def test_the_targets_tables_are_checked(
    change: Callable[[DraftWeights], DraftWeights], message: str
) -> None:
    config = DraftConfig.from_dict(draft_config(), name="tiny")
    with pytest.raises(InputError, match=message):
        Drafter(config, change(random_weights(config)))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (batch(a=(5, 91, 0.0, 1)), "covers positions 0 to 89"),
        (batch(a=(5, MAX_LEN, 0.0, 1)), f"wanted 0 to {MAX_LEN - 1}"),
        (batch(a=(-1, 3, 0.0, 1)), "anchors span -1"),
        (batch(a=(10**6, 3, 0.0, 1)), "anchors span 1000000"),
        (batch(a=(5, 3, -0.1, 1)), "temperatures"),
        (batch(a=(5, 3, float("nan"), 1)), "temperatures"),
        (batch(a=(5, 3, float("inf"), 1)), "temperatures"),
        (batch(n=(5, 3, 0.0, 1)), "no context"),
        (replace(batch(a=(5, 3, 0.0, 1)), requests=["a", "a"]), "twice"),
        (
            batch(**{f"r{i}": (5, 0, 0.0, 1) for i in range(5)}),
            "5 requests, max_requests is 4",
        ),
    ],
)
def test_bad_batches_are_refused(wanted: DraftBatch, message: str) -> None:
    drafter = make()
    feed(drafter, "a", taps(0, 90))
    with pytest.raises(InputError, match=message):
        drafter.propose(wanted)


def test_bad_context_is_refused() -> None:
    drafter = make()
    with pytest.raises(InputError, match=r"\[C, taps, d\] = \[3, 2, 32\]"):
        drafter.add_context(torch.zeros(3, 1, 32), torch.arange(3), torch.arange(3))
    with pytest.raises(InputError, match="consecutive"):
        drafter.slots("a", torch.tensor([0, 2]))
    with pytest.raises(InputError, match="raise max_model_len"):
        drafter.slots("a", torch.arange(MAX_LEN + 1))


def test_limits_of_the_config_are_kept() -> None:
    config = DraftConfig.from_dict(draft_config(), name="tiny")
    weights = random_weights(config)
    for drafts in (0, 5):
        with pytest.raises(InputError, match=f"{drafts} drafts asked for.*1 to 4"):
            Drafter(config, weights, num_drafts=drafts)
    with pytest.raises(InputError, match="takes 1 to 512"):
        Drafter(config, weights, max_model_len=513)


def test_packing_changes_no_draft() -> None:
    """bf16 on a CPU runs on packed weights, fp32 numerics on plain ones; in logits of
    equal roundings the two are the same drafter."""
    config = DraftConfig.from_dict(draft_config(), name="tiny")
    weights = random_weights(config, dtype=torch.bfloat16)
    if not packed.can_pack(weights.context_proj):
        pytest.skip("this torch, on this machine, packs no bfloat16 weight")
    drafter = Drafter(config, weights, max_requests=4, max_model_len=MAX_LEN)
    lm_head = drafter.model.weights.lm_head
    assert lm_head is not None
    assert lm_head.is_mkldnn
    feed(drafter, "a", taps(0, 90))
    wanted = batch(a=THREE["a"])
    found = drafter.propose(wanted)
    drafter.model = DraftModel(config, weights, MAX_LEN)
    feed(drafter, "a", taps(0, 90))
    plain = drafter.propose(wanted)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.logits is not None
    assert plain.logits is not None
    assert relative_error(found.logits, plain.logits) < STEP_BF16


def test_fp32_numerics_keep_plain_weights() -> None:
    config = DraftConfig.from_dict(draft_config(), name="tiny")
    weights = random_weights(config, dtype=torch.bfloat16)
    drafter = Drafter(
        config, weights, max_requests=4, max_model_len=MAX_LEN, numerics="fp32"
    )
    feed(drafter, "a", taps(0, 90))
    draft = drafter.propose(batch(a=THREE["a"]))
    assert draft.logits is not None
    assert draft.logits.dtype == torch.float32


def test_from_pretrained_is_the_same_drafter(tmp_path: Path) -> None:
    drafter = make()
    weights = drafter.model.weights
    bare = replace(weights, embedding=None, lm_head=None)
    save_checkpoint(tmp_path, drafter.config, bare)
    loaded = Drafter.from_pretrained(
        tmp_path,
        embedding=weights.embedding,
        lm_head=weights.lm_head,
        max_model_len=MAX_LEN,
    )
    for each in (drafter, loaded):
        feed(each, "a", taps(0, 90))
    same(loaded.propose(batch(a=THREE["a"])), drafter.propose(batch(a=THREE["a"])))
    with pytest.raises(InputError, match="pass the target's"):
        Drafter.from_pretrained(tmp_path)
