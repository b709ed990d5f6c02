# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Bytes of a draft step: the published table to the megabyte, and what moves them."""

import math
from dataclasses import replace

import pytest

from sparkgap.bench.workloads import (
    Step,
    cache_bytes_per_token,
    floor_us,
    parameters,
    workload,
)
from sparkgap.config import DraftConfig, MarkovConfig
from sparkgap.errors import InputError

K3 = DraftConfig.preset("kimi-k3")

# Megabytes of weights: preset, ranks, stock, ours, ours with W2 read once.
TABLE = [
    ("kimi-k3", 1, 7585, 7585, 7082),
    ("kimi-k3", 2, 4439, 3889, 3637),
    ("kimi-k3", 4, 2867, 2041, 1915),
    ("kimi-k3", 8, 2080, 1117, 1054),
    ("kimi-k3", 16, 1687, 655, 623),
    ("kimi-k3.1", 8, 2721, 1244, 1118),
    ("kimi-k3-block5", 8, 1433, 796, 754),
]
# Microseconds of the same rows at the data sheet's 4.8 TB/s.
FLOORS = [
    (1580, 1580, 1475),
    (925, 810, 758),
    (597, 425, 399),
    (433, 233, 220),
    (351, 136, 130),
    (567, 259, 233),
    (298, 166, 157),
]
LAYOUTS = ("stock", "sparkgap", "sparkgap_w2_once")


def weights(config: DraftConfig, step: Step) -> list[int]:
    load = workload(config, step)
    return [load.total(layout, weights_only=True) for layout in LAYOUTS]


def stage(config: DraftConfig, step: Step, name: str) -> tuple[int, int, int]:
    (found,) = [s for s in workload(config, step).stages if s.name == name]
    return found.stock, found.sparkgap, found.sparkgap_w2_once


@pytest.mark.parametrize(
    ("preset", "ranks", "stock", "ours", "once"),
    TABLE,
    ids=[f"{row[0]}-tp{row[1]}" for row in TABLE],
)
def test_the_table_to_the_megabyte(preset, ranks, stock, ours, once):
    sizes = weights(DraftConfig.preset(preset), Step(tensor_parallel=ranks))
    assert [round(size / 1e6) for size in sizes] == [stock, ours, once]


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_the_tables_floors(index):
    preset, ranks, *_ = TABLE[index]
    sizes = weights(DraftConfig.preset(preset), Step(tensor_parallel=ranks))
    assert tuple(round(floor_us(size, 4.8)) for size in sizes) == FLOORS[index]


def test_no_layout_of_kimi_reads_more_than_was_promised():
    assert weights(K3, Step(tensor_parallel=8))[1] <= 1117e6
    k31 = DraftConfig.preset("kimi-k3.1")
    assert weights(k31, Step(tensor_parallel=8))[1] <= 1244e6


def test_parts_at_eight_ranks():
    step = Step(tensor_parallel=8)
    parts = {s.name: round(s.stock / 1e6) for s in workload(K3, step).stages}
    assert parts["a_projections"] == 151
    assert parts["attention"] + parts["mlp"] == pytest.approx(493, abs=1)
    assert parts["context_proj"] == 514
    assert parts["context_kv"] == 41
    assert parts["lm_head"] == 294
    assert parts["markov_w2"] == pytest.approx(84 * 7, abs=1)
    assert round(stage(K3, step, "context_proj")[1] / 1e6) == 64


def test_parameters():
    assert parameters(K3) == 3_562_312_961
    k31 = DraftConfig.preset("kimi-k3.1")
    embedding = k31.vocab_size * k31.hidden_size
    # Published as 2.687 B without the embedding.
    assert round((parameters(k31) - embedding) / 1e6) == 2687


def test_a_table_of_ids_is_no_parameter():
    reduced = replace(K3, draft_vocab_size=32000)
    rows = K3.vocab_size - 32000
    assert parameters(K3) - parameters(reduced) == rows * K3.markov.rank


def test_cache_rows():
    assert cache_bytes_per_token(K3) == 5760
    step = Step(requests=3, context=1001)
    assert stage(K3, step, "cache") == (3 * 1001 * 5760,) * 3
    # Four ranks share the cache: the longest share is 251 rows.
    shared = replace(step, tensor_parallel=8, context_parallel=4)
    assert stage(K3, shared, "cache")[1] == 3 * 251 * 5760


def test_logits_are_written_and_read():
    stock, ours, _ = stage(K3, Step(requests=2, tensor_parallel=8), "logits")
    assert stock == 2 * 2 * 7 * 163840 * 2
    assert ours == stock // 8


def test_matrices_are_read_once_for_all_requests():
    one, many = (weights(K3, Step(requests=r)) for r in (1, 64))
    w1_rows = 63 * K3.num_drafts * K3.markov.rank * 2
    assert [b - a for a, b in zip(one, many, strict=True)] == [w1_rows] * 3


def test_a_vocabulary_that_the_ranks_do_not_divide_is_padded():
    reduced = replace(K3, draft_vocab_size=32001)
    _, _, once = stage(reduced, Step(tensor_parallel=8), "markov_w2")
    assert once == math.ceil(32001 / 8) * 256 * 2


def test_fill_in_drafts_one_less():
    fill_in = replace(K3, sample_from_anchor=False)
    w2 = K3.vocab_size * 256 * 2
    assert stage(fill_in, Step(), "markov_w2") == (6 * w2, 6 * w2, w2)


@pytest.mark.parametrize(
    ("kind", "elements"),
    [("gated", 256 * (7168 + 256)), ("rnn", 3 * 256 * (2 * 256 + 7168))],
)
def test_maps_of_other_markov_heads(kind, elements):
    config = replace(K3, markov=MarkovConfig(kind, 256))
    size = elements * 2
    assert stage(config, Step(), "markov_map") == (7 * size, 7 * size, size)
    # And they are no part of the MLP, whose gate is named alike.
    assert stage(config, Step(), "mlp") == stage(K3, Step(), "mlp")


def test_no_markov_head():
    config = replace(K3, markov=None, confidence="hidden")
    names = [s.name for s in workload(config, Step()).stages]
    assert not [name for name in names if name.startswith("markov")]


def test_element_size():
    half, whole = (workload(K3, Step(element_bytes=n)).total("stock") for n in (1, 2))
    assert whole == 2 * half


def test_floor():
    # 4.5 TB/s by default.
    assert floor_us(4_500_000_000) == 1000
    assert floor_us(4_800_000, 4.8) == 1


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step(tensor_parallel=7), "num_attention_heads 64 is not a multiple of 7"),
        (Step(tensor_parallel=0), "0 tensor-parallel ranks"),
        (Step(tensor_parallel=4, context_parallel=3), "a divisor of 4"),
        (Step(requests=0), "the number of requests is 0, wanted at least 1"),
        (Step(context=-1), "the context is -1, wanted at least 0"),
        (Step(context_parallel=0), "context parallelism is 0, wanted at least 1"),
    ],
)
def test_refusals(step, said):
    with pytest.raises(InputError, match=said):
        workload(K3, step)
