# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Makes gumbel_golden.json: numbers from vLLM's own noise functions, none of its code.

    pip download vllm==0.33.0 --no-deps
    python tests/data/make_gumbel_golden.py vllm-0.33.0-*.whl

Needs triton (3.6.0 made the file); its interpreter runs the functions on a CPU. The
file holds `vectors`: noise at given keys; `drafted`: the same through vLLM's own salts;
and `sampled`: tokens chosen from whole logits. `test_gumbel.py` and
`test_markov_sample.py` read it. Floats are stored as the integer of their 32 bits.
"""

import hashlib
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
import types
import zipfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

MEMBER = "vllm/v1/worker/gpu/sample/gumbel.py"
DRAFT_SALT = 1 << 30

SEEDS = [0, 1, 7, -1, -5, 2**31, 2**32 + 7, 2**63 - 1, -(2**63), 0x123456789ABCDEF0]
POSITIONS = [0, 1, 5, 131071, 2**31 - 1, 2**32 - 1, 2**32 + 5, 2**40]
TOKENS = [0, 1, 1023, 1024, 31999, 65535, 65536, 151669, 163839, 2**24 + 1, 2**31]
# Tokens at seed 7, position 5 drafted: the largest hash of the first 2²⁵ (u is 1), the
# three smallest (u near 0), u just above ¼, u near ½ and 1 − 1/e (noise 0), u = 2⁻⁸.
EDGES = [11513427, 5021197, 16262773, 1206049, 32237831, 25123188, 20010111, 1226597]

# One case of whole sampling: temperatures, seeds and positions of its requests.
TEMPERATURES = [0.0, 0.3, 1.0, 2.0, 0.7]
REQUEST_SEEDS = [3, 7, -1, 2**40 + 9, -(2**62)]
FIRST_POSITIONS = [1, 17, 4095, 131071, 1048575]
STEPS, VOCAB = 3, 2500  # three blocks of 1024 there, the last one ragged


def load(wheel: Path, folder: Path) -> tuple[types.ModuleType, dict[str, str]]:
    """The module out of the wheel, and what says which one it was."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(MEMBER)
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    path = folder / "gumbel.py"
    path.write_bytes(source)
    # The one thing it imports of vLLM is triton under another name.
    stand_in = types.ModuleType("vllm.triton_utils")
    stand_in.tl, stand_in.triton = tl, triton
    sys.modules["vllm.triton_utils"] = stand_in
    spec = importlib.util.spec_from_file_location("gumbel_of_wheel", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = re.search(r"^Version: (\S+)$", metadata, re.MULTILINE)
    if found is None:
        raise LookupError(f"no version in {name}")
    digest = hashlib.sha256(source).hexdigest()
    return module, {"vllm": found[1], "file": MEMBER, "sha256": digest}


@triton.jit
def one_key(keys, hashes, uniforms, noises, rule: tl.constexpr, drafted: tl.constexpr):
    """One program a key, so that a block's best score is that key's noise."""
    row = tl.program_id(0)
    one = tl.arange(0, 1)
    seed, pos = tl.load(keys + 4 * row), tl.load(keys + 4 * row + 1)
    seed = rule.spec_step_seed(seed, tl.load(keys + 4 * row + 2))
    token = tl.load(keys + 4 * row + 3 + one)
    tl.store(hashes + row + one, rule.murmur3_hash32(seed, pos, token).to(tl.int64))
    tl.store(uniforms + row + one, rule.murmur3_uniform32(seed, pos, token))
    zero = token.to(tl.float32) * 0.0
    best, _ = rule.gumbel_noised_argmax(
        zero, token, token >= 0, seed, pos, 1.0, drafted, False
    )
    tl.store(noises + row, best)


def bits(values: torch.Tensor) -> list[int]:
    return (values.view(torch.int32).long() & 0xFFFFFFFF).tolist()


def measure(module, keys: list[tuple[int, int, int, int]], drafted: bool):
    """keys (seed, pos, step, token) → hashes, bits of uniforms, bits of noises."""
    count = len(keys)
    hashes = torch.empty(count, dtype=torch.int64)
    uniforms, noises = torch.empty(count), torch.empty(count)
    one_key[(count,)](torch.tensor(keys), hashes, uniforms, noises, module, drafted)
    return hashes.tolist(), bits(uniforms), bits(noises)


def vectors(module) -> list[list[int]]:
    """[seed, pos, token, hash, uniform, noise]: the keys are hashed as they are."""
    chosen = random.Random(0)
    keys = [(7, 5 + DRAFT_SALT, 0, token) for token in EDGES]
    keys += [(s, p, 0, TOKENS[i % 11]) for i, s in enumerate(SEEDS) for p in POSITIONS]
    keys += [(SEEDS[i % 10], 9 + DRAFT_SALT, 0, t) for i, t in enumerate(TOKENS)]
    for _ in range(200):
        seed, pos = chosen.getrandbits(64) - 2**63, chosen.getrandbits(21)
        keys.append((seed, pos + DRAFT_SALT, 0, chosen.randrange(163840)))
    measured = zip(keys, *measure(module, keys, drafted=False), strict=True)
    return [[seed, pos, token, *rest] for (seed, pos, _, token), *rest in measured]


def drafted(module) -> list[list[int]]:
    """[seed, sample_pos, step, token, noise]: salted by vLLM, position and step."""
    chosen = random.Random(1)
    keys = [(7, 6, 0, 11513427)]
    for step in range(8):
        for seed in (7, -1, 2**63 - 1, chosen.getrandbits(64) - 2**63):
            pos = chosen.choice([1, 6, 131072, 1048576])
            keys.append((seed, pos, step, chosen.randrange(163840)))
    # Drawn under the position before the one that the token will occupy.
    asked = [(seed, pos - 1, step, token) for seed, pos, step, token in keys]
    noises = measure(module, asked, drafted=True)[2]
    return [[*key, noise] for key, noise in zip(keys, noises, strict=True)]


def logits() -> torch.Tensor:
    """[requests, STEPS, VOCAB] in quarters between -4 and 4; many are equal."""
    rows = torch.arange(len(TEMPERATURES) * STEPS)[:, None]
    mixed = (
        rows * 7919 + torch.arange(VOCAB) * 104729 + rows * torch.arange(VOCAB)
    ) % 33
    return (mixed.float() / 4 - 4).view(len(TEMPERATURES), STEPS, VOCAB)


def sampled(module) -> dict[str, object]:
    """Tokens that vLLM's sampler draws from `logits()`, step by step, cache in use."""
    requests = len(TEMPERATURES)
    base = logits()
    cache = torch.zeros(requests, STEPS, VOCAB)
    tokens = []
    for step in range(STEPS):
        positions = torch.tensor(FIRST_POSITIONS) + step
        tokens.append(
            module.gumbel_sample(
                base[:, step].contiguous(),
                torch.arange(requests, dtype=torch.int32),
                torch.tensor(TEMPERATURES),
                torch.tensor(REQUEST_SEEDS),
                positions - 1,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=cache,
                logits_cache_col=torch.tensor(step, dtype=torch.int32),
            )
        )
    if not torch.equal(cache, base):
        raise RuntimeError("the cache does not hold the logits before temperature")
    return {
        "temperatures": TEMPERATURES,
        "seeds": REQUEST_SEEDS,
        "first_positions": FIRST_POSITIONS,
        "tokens": torch.stack(tokens, dim=1).tolist(),
    }


def rows(name: str, values: list[list[int]]) -> str:
    return f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in values) + "\n]"


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        module, source = load(Path(wheel), Path(folder))
        parts = [
            f'"source": {json.dumps(source | {"triton": triton.__version__})}',
            rows("vectors", vectors(module)),
            rows("drafted", drafted(module)),
            f'"sampled": {json.dumps(sampled(module))}',
        ]
    target = Path(__file__).with_name("gumbel_golden.json")
    target.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
