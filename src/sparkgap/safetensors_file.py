# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""The safetensors files of a checkpoint folder: what they hold, checked before use.

A file is 8 bytes of header length, a JSON header (name → dtype, shape, data offsets),
then the data. Headers are read here, so that a truncated file is told from a missing
tensor and both before a byte of data is read; data comes through the library.
"""

import json
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
    if single.exists():
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} is not an index of safetensors files ({error!r}); copy it anew"
        ) from error
    absent = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
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
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > min(MAX_HEADER, size - 8):
            raise _broken(file, size, "its header is cut off or is none")
        text = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [
            StoredTensor(name, str(t["dtype"]), tuple(map(int, t["shape"])), file)
            for name, t in header.items()
        ]
        end = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _broken(file, size, f"its header is not one ({error!r})") from error
    promised = 8 + length + end
    if promised != size:
        raise _broken(file, size, f"its header promises {promised:,} bytes")
    return tensors


def _broken(file: Path, size: int, why: str) -> InputError:
    return InputError(
        f"{file} is truncated or no safetensors file: it has {size:,} bytes, {why}; "
        "copy or download it again"
    )
