# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The safetensors files of a checkpoint folder: what they hold, checked before use.

A file is 8 bytes of header length, a JSON header (name → dtype, shape, data offsets),
then the data. Headers are read here, so that a truncated file is told from a missing
tensor and both before a byte of data is read; data comes through the library.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkgap.errors import InputError

INDEX = "model.safetensors.index.json"
# The library's own limit; a larger number is not a header length.
MAX_HEADER = 100_000_000
# Of the other types (packed ones, say) only the end of the data is checked.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
# What parsing raises on text that is not what it should be; text that is nested too
# deep is a RecursionError.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file: dtype as safetensors spells it ("BF16"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    def read(self) -> Tensor:
        """Its data. Raises InputError if the file cannot be read after all."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self.file}: cannot read {self.name}: {error}; copy the file anew"
            ) from error
        return tensor


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint folder, single file or sharded by an index."""
    index = folder / INDEX
    if index.exists():
        return _sharded(folder, index)
    single = folder / "model.safetensors"
    # A link that leads nowhere does not exist, and is told as such by _header.
    if single.exists() or single.is_symlink():
        return _header(single)
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    if pickled and not others:
        raise InputError(
            f"{folder} holds {pickled[0]}, a pickle, which can run code and is not "
            "read; convert it to safetensors"
        )
    raise InputError(
        f"{folder} holds neither model.safetensors nor {INDEX}"
        + (f" (but {', '.join(others)})" if others else "")
        + "; give a checkpoint's folder"
    )


def _sharded(folder: Path, index: Path) -> list[StoredTensor]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in placed.values()})
    except (*MALFORMED, OSError) as error:
        raise InputError(
            f"{index} is not an index of safetensors files ({error!r}); copy it anew"
        ) from error
    there = {path.name for path in folder.iterdir()}
    absent = [name for name in names if name not in there]
    if absent:
        raise InputError(
            f"{index.name} names {', '.join(absent)}, which {folder} does not hold; "
            "copy the missing files"
        )
    found = [tensor for name in names for tensor in _header(folder / name)]
    held = {tensor.name for tensor in found}
    lost = sorted(set(placed) - held)
    if lost:
        raise InputError(
            f"{index.name} places {lost[0]}"
            + (f" and {len(lost) - 1} more tensors" if len(lost) > 1 else "")
            + " in files that do not hold them; copy index and files of one checkpoint"
        )
    return found


def _header(file: Path) -> list[StoredTensor]:
    """A file's tensors, after checking that its size is what its header promises."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or length > min(MAX_HEADER, size - 8):
                raise _broken(file, size, "its header is cut off or is none")
            text = opened.read(length)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error}; copy it anew") from error
    try:
        tensors, end = _parsed(text, file)
    except MALFORMED as error:
        raise _broken(file, size, f"its header is not one ({error!r})") from error
    promised = 8 + length + end
    if promised != size:
        raise _broken(file, size, f"its header promises {promised:,} bytes")
    return tensors


def _parsed(text: bytes, file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors that a header lists, and the end of their data.

    Raises one of MALFORMED unless they lie side by side, each as long as its shape.
    """
    header: dict[str, dict[str, Any]] = json.loads(text)
    header.pop("__metadata__", None)
    tensors, places = [], []
    for name, fields in header.items():
        dtype, shape = fields["dtype"], fields["shape"]
        first, end = fields["data_offsets"]
        sizes = [*shape, first, end]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"{name} has shape {shape} at {first} to {end}")
        bytes_each = ITEM_BYTES.get(dtype)
        if bytes_each is not None and end - first != bytes_each * math.prod(shape):
            raise ValueError(f"{name}, {dtype} {shape}, has {end - first} bytes")
        tensors.append(StoredTensor(name, str(dtype), tuple(shape), file))
        places.append((first, end, name))
    filled = 0
    for first, end, name in sorted(places):
        if first != filled:
            raise ValueError(f"{name} starts at {first}, wanted {filled}")
        filled = end
    return tensors, filled


def _broken(file: Path, size: int, why: str) -> InputError:
    return InputError(
        f"{file} is truncated or no safetensors file: it has {size:,} bytes, {why}; "
        "copy or download it again"
    )
