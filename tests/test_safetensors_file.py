# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the Sparkgap authors
"""Safetensors files and folders of them: whatever is broken is told, in one way."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from sparkgap import safetensors_file
from sparkgap.errors import InputError
from sparkgap.safetensors_file import INDEX, StoredTensor, stored_tensors

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(5, dtype=torch.int64),
    "c": torch.ones(3, 1, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})
HEADER_END = 8 + struct.unpack("<Q", WHOLE[:8])[0]
BROKEN = r"truncated or no safetensors file: it has {size:,} bytes.*again"


def folder_of(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text)) + text.encode() + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes


def listed(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (t.dtype, t.shape) for t in stored_tensors(folder)}


def test_a_file_lists_its_tensors_and_their_data(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, WHOLE)
    assert listed(folder) == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (5,)),
        "c": ("BF16", (3, 1)),
        "none": ("F32", (0, 4)),
    }
    for tensor in stored_tensors(folder):
        assert torch.equal(tensor.read(), TENSORS[tensor.name])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_any_type_is_listed(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whether it is served is for others to say."""
    folder = folder_of(tmp_path, save({"a": torch.zeros(3, 2).to(dtype)}))
    assert listed(folder)["a"][1] == (3, 2)


def test_a_type_that_is_not_known_is_listed(tmp_path: Path) -> None:
    packed = entry(dtype="F4", shape=[8])
    assert listed(folder_of(tmp_path, file_of({"a": packed}, b"1234"))) == {
        "a": ("F4", (8,))
    }


def test_a_file_cut_off_anywhere_is_told(tmp_path: Path) -> None:
    for size in range(len(WHOLE)):
        folder = folder_of(tmp_path, WHOLE[:size])
        with pytest.raises(InputError, match=BROKEN.format(size=size)):
            stored_tensors(folder)


@pytest.mark.parametrize("more", [b"x", b"\0" * 4096], ids=["a byte", "a page"])
def test_a_file_that_is_too_long_is_told(tmp_path: Path, more: bytes) -> None:
    with pytest.raises(InputError, match=f"promises {len(WHOLE):,} bytes"):
        stored_tensors(folder_of(tmp_path, WHOLE + more))


@pytest.mark.parametrize(
    "content",
    {
        "absurd length": struct.pack("<Q", 2**60) + b"{}",
        "greatest length": b"\xff" * 64,
        "text": b"not a safetensors file at all, but text of some length",
        "no JSON": file_of("{]"),
        "no UTF-8": struct.pack("<Q", 2) + b"\xff\xfe",
        "list": file_of([]),
        "number": file_of(7),
        "null": file_of("null"),
        "string": file_of('"a"'),
        "nested too deep": file_of("[" * 100_000),
        "entry is a number": file_of({"a": 1}),
        "entry is a list": file_of({"a": [1]}),
        "no dtype": file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
        "no offsets": file_of({"a": {"dtype": "F32", "shape": [0]}}),
        "dtype is a list": file_of({"a": entry(dtype=[])}, b"1234"),
        "shape is a number": file_of({"a": entry(shape=1)}, b"1234"),
        "shape is text": file_of({"a": entry(shape="1")}, b"1234"),
        "size is text": file_of({"a": entry(shape=["1"])}, b"1234"),
        "size is negative": file_of({"a": entry(shape=[-1])}, b"1234"),
        "sizes are negative": file_of({"a": entry(shape=[-1, -1])}, b"1234"),
        "size is a fraction": file_of({"a": entry(shape=[1.0])}, b"1234"),
        "size is true": file_of({"a": entry(shape=[True])}, b"1234"),
        "size is infinite": file_of({"a": entry(shape=[float("inf")])}, b"1234"),
        "one offset": file_of({"a": entry(data_offsets=[4])}, b"1234"),
        "three offsets": file_of({"a": entry(data_offsets=[0, 4, 4])}, b"1234"),
        "offset is infinite": file_of(
            {"a": entry(data_offsets=[0, float("inf")])}, b"1234"
        ),
        "offset is negative": file_of({"a": entry(data_offsets=[-4, 0])}),
        "offsets run back": file_of({"a": entry(dtype="F4", data_offsets=[4, 0])}),
        "fewer bytes than the shape": file_of({"a": entry(shape=[2])}, b"1234"),
        "more bytes than the shape": file_of({"a": entry(dtype="I8")}, b"1234"),
        "overlap": file_of({"a": entry(), "b": entry()}, b"1234"),
        "gap": file_of(
            {"a": entry(), "b": entry(data_offsets=[8, 12])}, b"123456789012"
        ),
        "late start": file_of({"a": entry(data_offsets=[4, 8])}, b"12345678"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_corrupt_file_is_told(tmp_path: Path, content: tuple[str, bytes]) -> None:
    folder = folder_of(tmp_path, content[1])
    with pytest.raises(InputError, match=BROKEN.format(size=len(content[1]))):
        stored_tensors(folder)


def test_an_absurd_header_length_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header longer than the library's limit is none, though the file be as long."""
    monkeypatch.setattr(safetensors_file, "MAX_HEADER", HEADER_END - 9)
    with pytest.raises(InputError, match="its header is cut off or is none"):
        stored_tensors(folder_of(tmp_path, WHOLE))
    monkeypatch.setattr(safetensors_file, "MAX_HEADER", HEADER_END - 8)
    assert stored_tensors(tmp_path)


@given(content=st.binary(max_size=200))
@example(content=b"")
@example(content=struct.pack("<Q", 0))
def test_bytes_at_random_are_told(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folder_of(tmp_path_factory.mktemp("random"), content)
    with pytest.raises(InputError, match="truncated or no safetensors file"):
        stored_tensors(folder)


@given(place=st.integers(0, HEADER_END - 1), byte=st.integers(0, 255))
def test_a_flipped_byte_of_the_header_is_told_or_read_as_the_library_does(
    place: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No other error, and what passes has the shapes that the library reads."""
    content = WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    folder = folder_of(tmp_path_factory.mktemp("flipped"), content)
    try:
        found = stored_tensors(folder)
        read = {tensor.name: tensor.read() for tensor in found}
    except InputError:
        return
    whole = load_file(folder / "model.safetensors")
    assert {t.name: t.shape for t in found} == {n: t.shape for n, t in whole.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())


def test_a_file_that_changes_after_its_header_was_read_is_told(tmp_path: Path) -> None:
    first, *_ = stored_tensors(folder_of(tmp_path, WHOLE))
    folder_of(tmp_path, WHOLE[:-1])
    with pytest.raises(InputError, match=f"cannot read {first.name}.*copy the file"):
        first.read()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=f"cannot read {first.name}.*copy the file"):
        first.read()
    folder_of(tmp_path, save({"other": torch.ones(1)}))
    with pytest.raises(InputError, match=f"cannot read {first.name}"):
        first.read()


def test_a_tensor_knows_its_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, save({"a": torch.ones(2)}))
    file = tmp_path / "model.safetensors"
    assert stored_tensors(folder) == [StoredTensor("a", "F32", (2,), file)]


@pytest.mark.parametrize("what", ["folder", "link to nothing"])
def test_what_is_no_file_is_told(tmp_path: Path, what: str) -> None:
    file = tmp_path / "model.safetensors"
    if what == "folder":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"model.safetensors cannot be read.*anew"):
        stored_tensors(tmp_path)


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"neither model.safetensors nor {INDEX};"):
        stored_tensors(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(WHOLE)
    with pytest.raises(InputError, match=r"but adapter.safetensors.*give a checkpoint"):
        stored_tensors(tmp_path)


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"pytorch_model.bin, a pickle.*convert it to"):
        stored_tensors(tmp_path)


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert stored_tensors(folder_of(tmp_path, WHOLE))


def write_index(folder: Path, placed: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": placed})
    (folder / INDEX).write_text(text)


def test_an_index_counts_before_a_single_file(tmp_path: Path) -> None:
    folder_of(tmp_path, WHOLE)
    for i, name in enumerate("ab"):
        save_file({name: TENSORS[name]}, tmp_path / f"part-{i}.safetensors")
    write_index(tmp_path, {"a": "part-0.safetensors", "b": "part-1.safetensors"})
    files = {t.name: t.file.name for t in stored_tensors(tmp_path)}
    assert files == {"a": "part-0.safetensors", "b": "part-1.safetensors"}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "not an index.*copy it anew"),
        (b"", "not an index"),
        (b"\xff\xfe", "not an index"),
        (b"[]", "not an index"),
        (b"null", "not an index"),
        (b"{}", "not an index"),
        (b'{"weight_map": 3}', "not an index"),
        (b'{"weight_map": ["a"]}', "not an index"),
        (b"[" * 100_000, "not an index"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "names gone.*copy the missing"),
        (b'{"weight_map": {"a": 7}}', "names 7"),
        (b'{"weight_map": {"a": ".."}}', r"names \.\., which"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', r"names \.\./model"),
        (b'{"weight_map": {"a": "./model.safetensors"}}', r"names \./model"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "names /etc/passwd"),
        (b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}', "names xxx"),
        (b'{"weight_map": {"a": "sub"}}', "sub cannot be read"),
        (b'{"weight_map": {"z": "model.safetensors"}}', "places z in files that"),
        (
            b'{"weight_map": {"y": "model.safetensors", "z": "model.safetensors"}}',
            "places y and 1 more tensors in files that do not hold them; copy index",
        ),
        (b'{"weight_map": {"a": "cut.safetensors"}}', r"cut.safetensors is truncated"),
    ],
)
def test_a_broken_index_is_told(tmp_path: Path, index: bytes, message: str) -> None:
    folder = tmp_path / "draft"
    (folder / "sub").mkdir(parents=True)
    folder_of(folder, WHOLE)
    folder_of(tmp_path, WHOLE)
    (folder / "cut.safetensors").write_bytes(WHOLE[:-1])
    (folder / INDEX).write_bytes(index)
    with pytest.raises(InputError, match=message):
        stored_tensors(folder)


def test_an_index_that_is_a_folder_is_told(tmp_path: Path) -> None:
    (folder_of(tmp_path, WHOLE) / INDEX).mkdir()
    with pytest.raises(InputError, match="not an index"):
        stored_tensors(tmp_path)
