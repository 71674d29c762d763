from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from duoka.checkpoint import formats
from duoka.checkpoint.formats import safetensors
from duoka.errors import WeightsError

KINDS = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
KINDS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.float64, torch.uint16]


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_what_the_library_writes_is_read(
    shapes: list[tuple[torch.dtype, list[int]]], metadata: dict[str, str]
) -> None:
    made = {f"t{number}": torch.randint(0, 2, shape).to(kind) for number, (kind, shape) in enumerate(shapes)}
    with Folder() as folder:
        path = folder / "x.safetensors"
        path.write_bytes(save(made, metadata or None))
        contents = safetensors.read(path)
        assert dict(contents.metadata) == metadata
        assert set(contents.tree) == set(made)
        for name, stored in contents.tree.items():
            assert_same(stored.read(), made[name])
            target = torch.empty_like(made[name])
            stored.read_into(target)
            assert_same(target, made[name])


def assert_same(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()


def Folder() -> Any:  # hypothesis wants a new one for each example
    import tempfile

    class Temporary(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> Path:  # type: ignore[override]
            return Path(super().__enter__())

    return Temporary()


def written(tmp_path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", b""),
        (b"[]", b""),
        (b"\xff\xff", b""),
        (b"[" * 100_000, b""),
        (b'{"a":1,"a":2}', b""),
        ({"a": 3}, b""),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry(0, 4, [1])}, b"123"),
        ({"a": entry(0, 4, [1])}, b"12345"),
        ({"a": entry(0, 4, [2])}, b"1234"),
        ({"a": entry(0, 4, [-1])}, b"1234"),
        ({"a": entry(0, 4, [1.0])}, b"1234"),
        ({"a": entry(0, 4, [True])}, b"1234"),
        ({"a": entry(0, 4, [1], "F7")}, b"1234"),
        ({"a": entry(0, 4, [1], ["F32"])}, b"1234"),
        ({"a": entry(0, 4, [1 << 62, 0])}, b"1234"),
        ({"a": entry(0, 0, [1 << 40, 1 << 40, 0])}, b""),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, b"1234"),
        ({"a": entry(4, 8, [1])}, b"12345678"),
        ({"a": entry(0, 4, [1]), "__metadata__": {"x": 1}}, b"1234"),
        ({"a": entry(0, 4, [1]), "__metadata__": []}, b"1234"),
    ],
)
def test_damaged_headers(header: Any, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        safetensors.read(written(tmp_path, header, data))


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 41)  # a hole: it takes no space
    with pytest.raises(WeightsError, match="header would have 1099511627776 bytes"):
        safetensors.read(path)


def test_ten_gigabytes_are_shown_from_the_header_alone(tmp_path: Path) -> None:
    size = 10 * 10**9
    path = written(tmp_path, {"big": entry(0, size, [size // 4])})
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + size)  # a hole
    (big,) = safetensors.read(path).tree.values()
    assert big.nbytes == size


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_header_of_any_length_is_told_from_a_pickle(name: str, tmp_path: Path) -> None:
    """A pickle begins with the byte 128, as does a header of length 128, 384, …"""
    text = json.dumps({"a": entry(0, 8, [2])}).encode()
    for length in (len(text), 127, 128, 129, 384, 512, 640, 32768 + 128):
        data = length.to_bytes(8, "little") + text.ljust(length) + b"12345678"
        (tmp_path / name).write_bytes(data)
        assert formats.read(tmp_path / name).format == "safetensors"


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_the_wrong_name_is_read_as_what_it_is(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.safetensors", _use_new_zipfile_serialization=zipped)
    assert "torch.save" in formats.read(tmp_path / "x.safetensors").format


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": entry(0, 8, [2])}, b"12345678")
    contents = safetensors.read(path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(WeightsError, match="ends too early"):
        contents.tree["a"].read()
