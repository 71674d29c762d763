"""Safetensors: 8 bytes with the length of a JSON header, the header, the data of all tensors.

Read here instead of by the safetensors library: data go straight from the file into the model's memory, and the
header can be shown without torch. Tests compare it with the library.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.checkpoint.formats import DTYPES, FileContents, Stored, bytes_of, is_plain_memory, is_sharded, runs_of
from duoka.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

MOST = 1 << 62  # elements of a tensor
LONGEST_HEADER = 100_000_000  # bytes, as in the library
WIDENED = "duoka.complex128"  # metadata: names of complex128 tensors, stored as pairs of F64
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


class TensorFile:
    """An open file whose ranges can be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)  # tensors of the file keep it open until they are read
        self.size = os.fstat(self._fd).st_size

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill `memory` from byte `start` on."""
        done = 0  # a read may take a part: Linux reads at most 2 GiB at once
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], start + done)
            if count == 0:
                raise WeightsError(f"{self.path} ends too early: it has become shorter while it was read")
            done += count

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on."""
        data = bytearray(size)
        self.read_into(start, memoryview(data))
        return bytes(data)


class FileTensor(Stored):
    """A tensor in a safetensors file."""

    def __init__(self, file: TensorFile, dtype: str, shape: tuple[int, ...], start: int) -> None:
        self.file, self.dtype, self.shape, self.start = file, dtype, shape, start

    def read(self) -> Tensor:
        import torch

        tensor = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="cpu")
        if self.nbytes:
            self.file.read_into(self.start, bytes_of(tensor))
        return tensor

    def read_like(self, like: Tensor) -> Tensor:
        """Read the tensor; of a sharded one this rank's rows only."""
        import torch

        from duoka.view.tensor.batch import BatchTensor

        if not isinstance(like, BatchTensor) or not is_sharded(like) or tuple(like.shape) != self.shape:
            return super().read_like(like)
        rows = torch.empty(like._meta.local_shape, dtype=getattr(torch, self.dtype), device="cpu")
        memory = bytes_of(rows)
        for run in runs_of(like, rows.itemsize):
            self.file.read_into(self.start + run.at, memory[run.start : run.start + run.size])
        return BatchTensor(rows.to(like._rows.device), like._spec)

    def read_into(self, target: Tensor) -> None:
        """Read straight into the target's memory if possible."""
        import torch

        same = target.dtype == getattr(torch, self.dtype) and tuple(target.shape) == self.shape
        if same and is_plain_memory(target):
            self.file.read_into(self.start, bytes_of(target))
        else:
            super().read_into(target)


def matches(path: Path) -> bool:
    """Return True if the file begins like safetensors, or has its suffix and does not begin like torch's files."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") + 8 <= path.stat().st_size:
        return True
    # A damaged one is reported as such; some people name files of torch.save like this.
    return path.suffix == ".safetensors" and not head.startswith((b"\x80", b"PK\x03\x04"))


def read(path: Path, objects: str = "refuse") -> FileContents:
    """Read names, types and shapes from the header. Raises WeightsError if it is damaged."""
    file = TensorFile(path)
    header = _header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata are not strings")
    begin = int.from_bytes(file.read(0, 8), "little") + 8
    tree = {name: _tensor(file, begin, name, entry) for name, entry in header.items()}
    _check_covers(path, begin, file.size, tree)
    for name in _widened(metadata):  # other programs read these as pairs of floats
        if name in tree and tree[name].dtype == "float64" and tree[name].shape[-1:] == (2,):
            tree[name] = FileTensor(file, "complex128", tree[name].shape[:-1], tree[name].start)
    return FileContents(path, "safetensors", tree, metadata)


def _header(file: TensorFile) -> dict[str, Any]:
    if file.size < 8:
        raise _damaged(file.path, f"it has {file.size} bytes, fewer than any safetensors file")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > LONGEST_HEADER or length + 8 > file.size:
        raise _damaged(file.path, f"its header would have {length} bytes, but the file has {file.size}")
    try:
        header = json.loads(file.read(8, length), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(file.path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(file.path, "its header is not a JSON object")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert pairs to a dict, refusing duplicate names."""
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("a name occurs twice")
    return items


def _tensor(file: TensorFile, begin: int, name: str, entry: Any) -> FileTensor:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(file.path, f"its header is wrong for {name!r}") from error
    if not isinstance(code, str) or code not in _NAMES or code == "C128":
        raise WeightsError(f"{file.path}: {name!r} is of type {code!r}; duoka knows {', '.join(_NAMES)}")
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise _damaged(file.path, f"its header is wrong for {name!r}")
    if math.prod(number or 1 for number in shape) >= MOST:  # torch computes strides also for tensors without data
        raise _damaged(file.path, f"{name!r} would have more numbers than there can be")
    dtype = _NAMES[code]
    if end - start != math.prod(shape) * DTYPES[dtype][1] or begin + end > file.size:
        what = f"{name!r} {tuple(shape)} {dtype}"
        raise _damaged(file.path, f"{what} differs in size from bytes {start} to {end}, or the file ends before them")
    return FileTensor(file, dtype, tuple(shape), begin + start)


def _check_covers(path: Path, begin: int, size: int, tree: dict[str, FileTensor]) -> None:
    """Check that each byte of data belongs to exactly one tensor.

    begin: offset of the data in the file. size: of the whole file. Raises WeightsError if a byte belongs to none or
    to two, or the file is too short or too long.
    """
    at = begin
    # By size, too: a tensor without elements begins where the next one does.
    for tensor in sorted(tree.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != at:
            raise _damaged(path, f"byte {min(at, tensor.start)} belongs to two tensors, or to none")
        at += tensor.nbytes
    if at != size:
        raise _damaged(path, f"it has {size} bytes, but should have {at}")


def _widened(metadata: dict[str, str]) -> list[str]:
    try:
        names = json.loads(metadata.get(WIDENED, "[]"))
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged, or not a safetensors file: {why}")


# Writing: `sharded.py` fills the file.


@dataclass(frozen=True)
class Layout:
    """A safetensors file. header: all bytes before the data. offsets: start of each tensor. size: of the file."""

    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Compute the layout in the order of the safetensors library: large elements first, for alignment, then by name.

    Raises WeightsError if a tensor is sparse, quantised or on the meta device, and so has no plain data.
    """
    codes = {name: _code(name, tensor) for name, tensor in tensors.items()}
    widened = sorted(name for name, (code, _) in codes.items() if code == "C128")  # which safetensors has no code for
    if widened:
        metadata = {**metadata, WIDENED: json.dumps(widened)}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: dict[str, int] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-codes[name][1], name)):
        code, shape = codes[name][0], list(tensors[name].shape)
        begin, at = at, at + math.prod(shape) * codes[name][1]
        code, shape = ("F64", [*shape, 2]) if code == "C128" else (code, shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, at]}
        ends[name] = begin
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8, as the library's do
    text = len(text).to_bytes(8, "little") + text
    return Layout(text, {name: len(text) + begin for name, begin in ends.items()}, len(text) + at)


def _code(name: str, tensor: Tensor) -> tuple[str, int]:
    import torch

    known = DTYPES.get(str(tensor.dtype)[6:])
    if known is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
        raise WeightsError(f"{name!r} is {kind}, which safetensors cannot store; a .pth file can")
    return known
