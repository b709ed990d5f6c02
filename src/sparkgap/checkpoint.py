# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Checkpoint folders: config.json beside safetensors, read and written.

Loading reads every file's header first (`safetensors_file.py`), so that a missing,
extra or mis-shaped tensor of a 7 GB checkpoint is refused before its data is read.

Names other than the published ones are mapped: prefixes `model.` and `draft_model.`,
`fc` / `hidden_norm` / `norm` for context_proj / context_norm / final_norm. Fused
gate/up and fused q_a/kv_a are taken apart.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkgap.config import DraftConfig
from sparkgap.errors import InputError
from sparkgap.safetensors_file import INDEX, StoredTensor, stored_tensors
from sparkgap.weights import (
    DraftWeights,
    Shapes,
    assemble,
    canonical_tensors,
    expected_tensors,
    optional_tensors,
)


class WeightsError(InputError):
    """A checkpoint does not hold the tensors its config asks for; all are listed."""


_RENAMED = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


def _canonical(name: str) -> str | None:
    """The canonical name, or None for a tensor that is known and not needed."""
    for prefix in ("draft_model.", "model."):
        name = name.removeprefix(prefix)
    # t2d is the inverse of d2t; rotary tables are computed.
    if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
        return None
    return _RENAMED.get(name, name)


def _split_fused(name: str, c: DraftConfig) -> list[tuple[str, int, int]]:
    """A fused tensor → the (canonical name, first row, rows) that it holds."""
    stem, _, last = name.removesuffix(".weight").rpartition(".")
    parts = {
        "gate_up_proj": [
            ("gate_proj", c.intermediate_size),
            ("up_proj", c.intermediate_size),
        ],
        "fused_qkv_a_proj": [
            ("q_a_proj", c.q_lora_rank),
            ("kv_a_proj_with_mqa", c.latent_dim),
        ],
    }.get(last, [])
    found, row = [], 0
    for part, rows in parts:
        found.append((f"{stem}.{part}.weight", row, rows))
        row += rows
    return found


@dataclass(frozen=True)
class _Source:
    """Where a canonical tensor lies: rows [row, row + rows) of a stored one, or all."""

    stored: StoredTensor
    row: int = 0
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape
        return shape if self.rows is None else (self.rows, *shape[1:])

    def read(self) -> Tensor:
        tensor = self.stored.read()
        return tensor if self.rows is None else tensor[self.row : self.row + self.rows]


def check_weights(path: str | Path, config: DraftConfig) -> None:
    """Raise what `load_weights` would, from the files' headers alone."""
    _checked(Path(path), config)


def load_weights(
    path: str | Path,
    config: DraftConfig,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> DraftWeights:
    """Read a checkpoint folder's safetensors, single or sharded.

    dtype: convert floating tensors (default: as stored). Raises WeightsError listing
    every missing, extra, mis-shaped or quantised tensor, InputError for broken files.
    """
    folder = Path(path)
    sources = _checked(folder, config)

    def read(name: str) -> Tensor:
        tensor = sources[name].read()
        wide = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wide)

    tensors = {name: read(name) for name in sources}
    if config.draft_vocab_size != config.vocab_size:
        _check_d2t(tensors["d2t"], config, folder)
    return assemble(tensors, config)


def _checked(folder: Path, config: DraftConfig) -> dict[str, _Source]:
    """Where each tensor of a checkpoint lies; WeightsError unless all is as it must."""
    sources, problems = _sources(stored_tensors(folder), config)
    problems += _misfits({n: source.shape for n, source in sources.items()}, config)
    for name in sources.keys() & (expected_tensors(config) | optional_tensors(config)):
        problems += _unserved(name, sources[name].stored.dtype)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in sorted(problems))
        raise WeightsError(
            f"{folder} does not hold the weights its config.json describes; use the "
            f"files and the config.json of one checkpoint:{lines}"
        )
    return sources


def _sources(
    stored: list[StoredTensor], config: DraftConfig
) -> tuple[dict[str, _Source], list[str]]:
    sources: dict[str, _Source] = {}
    problems = []
    for tensor in stored:
        name = _canonical(tensor.name)
        if name is None:
            continue
        fused = _split_fused(name, config)
        rows = sum(count for _, _, count in fused)
        if fused and tensor.shape[:1] != (rows,):
            problems.append(
                f"{tensor.name} is {list(tensor.shape)}, wanted {rows} rows"
            )
        parts = [(part, _Source(tensor, row, count)) for part, row, count in fused]
        for part, source in parts or [(name, _Source(tensor))]:
            if part in sources:
                twice = sources[part].stored
                problems.append(
                    f"{part} is there twice: as {twice.name} in {twice.file.name} and "
                    f"as {tensor.name} in {tensor.file.name}"
                )
            sources[part] = source
    return sources, problems


def _misfits(shapes: Shapes, config: DraftConfig) -> list[str]:
    """What tensors of these names and shapes lack, or have too much, for a config."""
    wanted = expected_tensors(config)
    allowed = wanted | optional_tensors(config)
    problems = [
        f"{n} {list(s)} is missing" for n, s in wanted.items() if n not in shapes
    ]
    for name, shape in shapes.items():
        if name not in allowed:
            problems.append(
                f"{name} {list(shape)} is extra: the config has no place for it"
            )
        elif shape != allowed[name]:
            problems.append(f"{name} is {list(shape)}, wanted {list(allowed[name])}")
    return problems


def _unserved(name: str, dtype: str) -> list[str]:
    kinds = ("I64", "I32") if name == "d2t" else ("F32", "F16", "BF16")
    if dtype in kinds:
        return []
    wanted = f"{name} is stored as {dtype}, wanted {' or '.join(kinds)}"
    return [wanted if name == "d2t" else f"{wanted} (quantised is not served yet)"]


def _check_d2t(d2t: Tensor, config: DraftConfig, folder: Path) -> None:
    """Offsets must lead into the target's vocabulary, each id at most once."""
    targets = d2t + torch.arange(len(d2t), device=d2t.device)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= config.vocab_size:
        raise WeightsError(
            f"{folder}: d2t maps draft ids to target ids {low} to {high}, wanted 0 to "
            f"{config.vocab_size - 1}; d2t holds offsets, target id = i + d2t[i]"
        )
    if len(targets.unique()) != len(targets):
        raise WeightsError(f"{folder}: d2t maps two draft ids to one target id")


def save_checkpoint(
    path: str | Path, config: DraftConfig, weights: DraftWeights
) -> None:
    """Write config.json and model.safetensors over what checkpoint there was.

    Both are written under other names first, so a failure leaves the old ones and no
    more. Files of a sharded checkpoint are removed: its index would be read instead of
    what is written here. Raises WeightsError before anything is touched if the weights
    are not the config's.
    """
    folder = Path(path)
    tensors = _apart(canonical_tensors(weights))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = _misfits(shapes, config)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in sorted(problems))
        raise WeightsError(
            f"the weights are not those of {config.name}, nothing was written; give "
            f"whole weights and the config they were made for:{lines}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    names = ("model.safetensors", "config.json")
    data, text = parts = [folder / f"{name}.part" for name in names]
    try:
        save_file(tensors, data, metadata={"format": "pt"})
        # The library's files are their owner's to read; a checkpoint is for others.
        data.chmod(0o644)
        written = json.dumps(config.to_dict(), indent=2) + "\n"
        text.write_text(written, encoding="utf-8")
        shards = _unindexed(folder)
        for part, name in zip(parts, names, strict=True):
            part.replace(folder / name)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    for old in shards:
        old.unlink()


def _unindexed(folder: Path) -> list[Path]:
    """Removes an index, and tells the files of its checkpoint; without an index, files
    of such names are somebody else's."""
    if not (folder / INDEX).exists():
        return []
    (folder / INDEX).unlink()
    return list(folder.glob("model-*-of-*.safetensors"))


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and none twice, which the library refuses: an embedding may be the
    lm_head as well."""
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        apart[name] = whole.clone() if whole.data_ptr() in seen else whole
        seen.add(whole.data_ptr())
    return apart
