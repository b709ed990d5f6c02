# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The noise rule: Gumbel noise as a pure function of (seed, position, token id).

    seed, pos, token ──hash──▶ uint32 ──uniform──▶ fp32 in (0, 1] ──noise──▶ fp32

Nothing else enters: not a request's place in the batch, not padding, not how the
vocabulary is cut. Adding the noise to logits / temperature and taking the maximum draws
from softmax(logits / temperature). The rule is vLLM 0.33's: hash and uniform are the
same bits as there on every machine; the noise is within 4 ulp of it, counted at the
larger of |noise| and 1, since logarithms differ between machines.

Shapes broadcast: seed [R, 1], pos [R, 1] and token [V] give [R, V].
"""

import torch
from torch import Tensor

DRAFT_POSITION_SALT = 1 << 30
"""Added to positions when drafting: no text is that long, so verification, which draws
at the positions themselves, never meets the draft's noise."""

_KEY_BYTES = 16  # four words of 32 bits; MurmurHash3 mixes the length in at the end


def hash(seed: Tensor, pos: Tensor, token: Tensor) -> Tensor:
    """MurmurHash3-32 of seed (64 bits), pos (low 32 bits) and token id (low 32 bits).

    int64 tensors that broadcast → uint32 values, kept in int64.
    """
    state = torch.zeros_like(seed, dtype=torch.int32)
    for word in (seed, seed >> 32, pos, token):
        state = _mix(state, word.to(torch.int32))
    return _finalise(state ^ _KEY_BYTES).long() & 0xFFFFFFFF


def uniform(hashed: Tensor) -> Tensor:
    """uint32 values → (hash + ½) · 2⁻³², rounded once to fp32.

    Never 0, but exactly 1 for the 128 largest hashes. The halves convert exactly and
    their products are powers of two, so the sum is the only rounding, FMA or not.
    """
    high, low = (hashed >> 16).float(), (hashed & 0xFFFF).float()
    return high * 2.0**-16 + (low + 0.5) * 2.0**-32


def noise(u: Tensor) -> Tensor:
    """fp32 uniforms in (0, 1] → −log(−log(1 − u)) fp32, finite everywhere.

    Large noise comes from u → 0, where fp32 is finest. log(1 − u) is an eighth-order
    series below ¼; above, 1 − u is kept from 0 by 2⁻²⁴, so that u = 1 gives −2.8115.
    """
    series = torch.full_like(u, 1 / 8)
    for order in range(7, 0, -1):
        series = 1 / order + u * series
    direct = _log((1.0 - u).clamp(min=2.0**-24))
    return -_log(-torch.where(u < 0.25, -u * series, direct))


def gumbel(seed: Tensor, pos: Tensor, token: Tensor) -> Tensor:
    """Noise fp32 of integer tensors that broadcast: `hash`, `uniform`, `noise`."""
    return noise(uniform(hash(seed, pos, token)))


def draft_stream(seed: Tensor, sample_pos: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Seed and position under which draft step `step` draws; both int64, any shape.

    sample_pos is the position that the drafted token will occupy. The step is mixed
    into the seed's high word: noise depends on how far ahead a position was drafted.
    """
    return seed ^ (step << 32), sample_pos - 1 + DRAFT_POSITION_SALT


def _log(x: Tensor) -> Tensor:
    # In fp64, then rounded: the same bits from any maths library. fp32 logarithms of
    # MKL differ from these in 1 of 1000 arguments, and are no faster beside the hash.
    return x.double().log().float()


# uint32 arithmetic in int32, which wraps and is twice as fast on a CPU as masked int64.
# Constants are those of MurmurHash3_x86_32, less 2³² where they exceed int32.
def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate(word * (0xCC9E2D51 - 2**32), 15) * 0x1B873593
    return _rotate(state ^ word, 13) * 5 + (0xE6546B64 - 2**32)


def _finalise(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 16)) * (0x85EBCA6B - 2**32)
    state = (state ^ _shift(state, 13)) * (0xC2B2AE35 - 2**32)
    return state ^ _shift(state, 16)


def _rotate(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shift(x, 32 - bits)


def _shift(x: Tensor, bits: int) -> Tensor:
    # Right, filling with zeros; >> on int32 fills with the sign.
    return (x >> bits) & ((1 << (32 - bits)) - 1)
