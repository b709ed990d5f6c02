# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The noise rule against vLLM's own numbers, MurmurHash3 in integers, exact logs."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkgap.primitives import gumbel

GOLDEN = json.loads((Path(__file__).parents[1] / "data/gumbel_golden.json").read_text())
VECTORS = torch.tensor(GOLDEN["vectors"])
DRAFTED = torch.tensor(GOLDEN["drafted"])
WORD = 0xFFFFFFFF

int64s = st.integers(-(2**63), 2**63 - 1)


def floats(bits):
    """fp32 values of 32-bit patterns in int64."""
    return bits.to(torch.int32).view(torch.float32)


def rotate(x, bits):
    return (x << bits | x >> (32 - bits)) & WORD


def murmur(*words):
    """MurmurHash3_x86_32 of 32-bit words, seed 0."""
    state = 0
    for word in words:
        key = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = (rotate(state ^ key, 13) * 5 + 0xE6546B64) & WORD
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def ulps(actual, expected):
    """Distance in units of the last place of fp32 at max(|expected|, 1)."""
    size = expected.abs().clamp(min=1.0).double().log2().floor().exp2()
    return ((actual.double() - expected.double()).abs() / (size * 2.0**-23)).max()


def exact_noise(u):
    return -torch.log(-torch.log1p(-u.double()))


def test_golden_numbers_are_of_the_engine_we_follow():
    source = GOLDEN["source"]
    assert source["vllm"] == "0.33.0"
    assert source["file"] == "vllm/v1/worker/gpu/sample/gumbel.py"
    assert len(VECTORS) > 290
    assert len(DRAFTED) > 30


def test_hash_is_vllms_bit_for_bit():
    seed, pos, token, hashed, _, _ = VECTORS.T
    assert torch.equal(gumbel.hash(seed, pos, token), hashed)


def test_uniform_is_vllms_bit_for_bit():
    hashed, u = VECTORS[:, 3], VECTORS[:, 4]
    assert torch.equal(gumbel.uniform(hashed), floats(u))


def test_noise_is_vllms_within_4_ulp():
    u, noise = floats(VECTORS[:, 4]), floats(VECTORS[:, 5])
    assert ulps(gumbel.noise(u), noise) <= 4
    assert ulps(gumbel.gumbel(*VECTORS.T[:3]), noise) <= 4


def test_drafting_salts_are_vllms():
    seed, sample_pos, _, token, noise = DRAFTED.T
    # The step is one number a call, as in a step of drafting.
    streams = [gumbel.draft_stream(row[0], row[1], int(row[2])) for row in DRAFTED]
    seeds, positions = (torch.stack(part) for part in zip(*streams, strict=True))
    assert ulps(gumbel.gumbel(seeds, positions, token), floats(noise)) <= 4
    unsalted = gumbel.gumbel(seed, sample_pos, token)
    assert ulps(unsalted, floats(noise)) > 1000


def test_largest_uniform_is_one_and_its_noise_finite():
    seed, pos = gumbel.draft_stream(torch.tensor(7), torch.tensor(6), 0)
    u = gumbel.uniform(gumbel.hash(seed, pos, torch.tensor(11513427)))
    assert u == 1.0
    assert gumbel.noise(u).item() == pytest.approx(-2.8115, abs=1e-4)


@given(int64s, int64s, st.integers(0, 2**40))
def test_hash_is_murmur3(seed, pos, token):
    words = [seed & WORD, seed >> 32 & WORD, pos & WORD, token & WORD]
    hashed = gumbel.hash(*(torch.tensor(value) for value in (seed, pos, token)))
    assert hashed.dtype == torch.int64
    assert hashed.item() == murmur(*words)


def test_murmur_of_the_test_is_murmur3():
    # Published test vectors of MurmurHash3_x86_32 with seed 0.
    assert murmur(0) == 0x2362F9DE
    assert murmur(0xFFFFFFFF) == 0x76293B50
    assert murmur(0x87654321) == 0xF55B516B


@given(st.integers(0, WORD))
def test_uniform_is_rounded_once(hashed):
    # 33 significant bits: exact in fp64, so this is the one rounding.
    expected = torch.tensor((hashed + 0.5) * 2.0**-32, dtype=torch.float64).float()
    assert torch.equal(gumbel.uniform(torch.tensor(hashed)), expected)


def test_uniform_ends():
    hashed = torch.tensor([0, 1, WORD - 128, WORD - 127, WORD])
    u = gumbel.uniform(hashed)
    assert u.dtype == torch.float32
    assert u.tolist()[:2] == [2.0**-33, 1.5 * 2.0**-32]
    assert (u == 1.0).tolist() == [False, False, False, True, True]


def test_noise_is_the_double_logarithm():
    u = gumbel.uniform(torch.arange(0, 2**32 - 2**10, 39119))
    u = u[u < 1 - 2.0**-20]
    # Measured at the inner logarithm x = -log(1 - u), whose relative error is the outer
    # one's absolute: series 0.25⁸/9 = 1.7e-6 below ¼, six roundings of 2⁻²⁴ elsewhere,
    # and 1 - u rounded, which counts most where x is small: 2⁻²⁵ / x just above ¼.
    limit = torch.where(u < 0.25, u.double() ** 8 / 8, 0) + 8 * 2.0**-24
    error = (gumbel.noise(u).double() - exact_noise(u)).abs()
    rounding = exact_noise(u).abs() * 2.0**-24
    assert bool((error <= limit + rounding).all())


def test_noise_is_finite_at_every_extreme():
    u = torch.tensor([2.0**-33, 2.0**-24, 0.25, 1 - 2.0**-24, 1.0])
    noise = gumbel.noise(u)
    assert noise.dtype == torch.float32
    assert noise.tolist() == pytest.approx(
        [33 * math.log(2), 24 * math.log(2), 1.2459, -2.8115, -2.8115], abs=1e-4
    )


def test_noise_has_gumbels_moments():
    count = 200_000
    drawn = gumbel.gumbel(
        torch.tensor(-3), torch.arange(count)[:, None], torch.tensor([5])
    ).double()
    deviation = math.pi / math.sqrt(6)
    # Five standard errors: of the mean, and of the variance at kurtosis 5.4.
    assert abs(drawn.mean() - 0.5772157) < 5 * deviation / math.sqrt(count)
    spread = deviation**2 * math.sqrt(4.4 / count)
    assert abs(drawn.var() - deviation**2) < 5 * spread


def test_a_key_gives_the_same_bits_wherever_it_stands():
    seeds = torch.tensor([3, -9, 2**62])[:, None]
    positions, tokens = torch.tensor([8, 2**30, 77])[:, None], torch.arange(1003)
    whole = gumbel.gumbel(seeds, positions, tokens)
    assert whole.shape == (3, 1003)
    for start, stop, stride in [(0, 1, 1), (5, 22, 1), (1, 1003, 7), (1002, 1003, 1)]:
        part = gumbel.gumbel(seeds, positions, tokens[start:stop:stride])
        assert torch.equal(part, whole[:, start:stop:stride])
    transposed = gumbel.gumbel(seeds.T, positions.T, tokens[:, None])
    assert torch.equal(transposed, whole.T)
    assert gumbel.gumbel(seeds[:0], positions[:0], tokens).shape == (0, 1003)


def test_every_part_of_the_key_counts():
    key = (torch.tensor(12345), torch.tensor(678), torch.tensor(90))
    hashes = {int(gumbel.hash(*key))}
    for part in range(3):
        # Bits that matter: all 64 of a seed, the low 32 of position and token.
        for bit in range(64 if part == 0 else 32):
            flip = -(2**63) if bit == 63 else 1 << bit
            changed = [v ^ flip if i == part else v for i, v in enumerate(key)]
            hashes.add(int(gumbel.hash(*changed)))
    assert len(hashes) == 1 + 64 + 32 + 32


def test_steps_and_verification_draw_from_other_streams():
    seed, pos, tokens = torch.tensor(7), torch.tensor(100), torch.arange(64)
    verified = [gumbel.gumbel(seed, pos + i, tokens) for i in (-1, 0, 1)]
    drafted = [
        gumbel.gumbel(*gumbel.draft_stream(seed, pos, step), tokens)
        for step in range(8)
    ]
    streams = torch.stack(verified + drafted)
    assert len(streams.unique(dim=0)) == 11
