"""Directories of torch.distributed.checkpoint.

Their `.metadata` is a pickle, which torch's reader executes. Here a restricted unpickler replaces the few known
metadata classes by holders of their fields, and refuses all others.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from duoka.checkpoint.formats import DTYPES, FileContents, Stored
from duoka.checkpoint.formats.safetensors import TensorFile
from duoka.errors import UnsafePickle, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

DEEPEST = 64  # levels of nested dicts
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = frozenset(
    {
        f"{_METADATA}.Metadata",
        f"{_METADATA}.TensorStorageMetadata",
        f"{_METADATA}.BytesStorageMetadata",
        f"{_METADATA}.TensorProperties",
        f"{_METADATA}.ChunkStorageMetadata",
        f"{_METADATA}.MetadataIndex",
        f"{_METADATA}.StorageMeta",
        f"{_METADATA}._MEM_FORMAT_ENCODING",
        "builtins.getattr",  # by which the first versions of Python 3.11 pickle a member of an enum
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
    }
)


class Fields:
    """Holds the pickled fields of a metadata class, and runs no other code."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        # A class with slots is pickled as (its __dict__ or None, its slots).
        if isinstance(state, tuple) and len(state) == 2 and (state[0] is None or isinstance(state[0], dict)):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.__dict__["state"] = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _Restricted(pickle.Unpickler):
    """An unpickler that builds dicts, lists, numbers, strings and `Fields` only."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if f"{module}.{name}" in _KNOWN:
            return type("Fields", (Fields,), {})  # a new class each time: a pickle can write into a class
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise UnsafePickle(
            f"reading it would call `{module}.{name}`, and no code of it has been run; if you trust its origin, "
            "load it with torch.distributed.checkpoint"
        )


class Chunked(Stored):
    """A tensor in pieces. chunks: offsets in the whole, file, position and length in the file."""

    def __init__(
        self, dtype: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], TensorFile, int, int]]
    ) -> None:
        self.dtype, self.shape, self.chunks = dtype, shape, chunks

    def read(self) -> Tensor:
        try:
            return self._put_together()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            directory = self.chunks[0][1].path.parent if self.chunks else "the directory"
            raise WeightsError(f"{directory} is damaged: the parts of a tensor do not fit: {error}") from error

    def _put_together(self) -> Tensor:
        import torch

        # Before memory is taken: metadata of a few bytes can claim any size.
        there = sum(length for _, _, _, length in self.chunks)
        if math.prod(self.shape) * DTYPES.get(self.dtype, ("", 1))[1] > there:
            raise ValueError(f"{there} bytes were found for {self.shape}")
        tensor = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="cpu")
        filled, corners = 0, list[list[int]]()
        for offsets, file, start, length in self.chunks:
            piece = _load(file, start, length)
            target = tensor
            for dim, (offset, size) in enumerate(zip(offsets, piece.shape, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(piece)
            filled += piece.numel()
            corners.append([*offsets, *map(sum, zip(offsets, piece.shape, strict=True))])
        if filled != tensor.numel():
            raise ValueError(f"{filled} of {tensor.numel()} numbers were found")
        _check_apart(corners, len(self.shape))
        return tensor


def _check_apart(corners: list[list[int]], dims: int) -> None:
    """Check that parts do not overlap: they could sum up to the right size and leave memory uninitialized."""
    boxes = numpy.array(corners, dtype=numpy.int64).reshape(len(corners), 2, dims)
    for number, (begin, end) in enumerate(boxes[:-1]):
        begins, ends = boxes[number + 1 :, 0], boxes[number + 1 :, 1]
        if bool(((begin < ends) & (begins < end)).all(axis=1).any()):
            raise ValueError("two of its parts overlap")


def _load(file: TensorFile, start: int, length: int) -> Any:
    import torch

    try:
        return torch.load(io.BytesIO(file.read(start, length)), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of any type on damaged files
        raise WeightsError(f"{file.path} cannot be read at byte {start}: {str(error).splitlines()[0]}") from error


def matches(path: Path) -> bool:
    """Return True for a directory with DCP's `.metadata`, that file, or a `.distcp` file beside it."""
    return _directory(path).joinpath(".metadata").is_file() and (
        path.is_dir() or path.name == ".metadata" or path.suffix == ".distcp"
    )


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def read(path: Path, objects: str = "refuse") -> FileContents:
    """Read the tensors, with data on demand; other values are skipped."""
    directory = _directory(path)
    try:
        metadata = _Restricted(io.BytesIO((directory / ".metadata").read_bytes())).load()
        tree, left = _tree(directory, metadata)
    except UnsafePickle as error:
        raise UnsafePickle(f"{directory / '.metadata'} is refused: {error}") from error
    except WeightsError:
        raise
    except Exception as error:  # pickle raises errors of any type on damaged files
        raise WeightsError(f"{directory / '.metadata'} is damaged, or not DCP metadata: {error!r}") from error
    notes = (f"{left} values that are not tensors were not read",) if left else ()
    return FileContents(path, "DCP directory", tree, {}, notes)


def _tree(directory: Path, metadata: Any) -> tuple[dict[str, Any], int]:
    files: dict[str, TensorFile] = {}
    chunks: dict[str, list[tuple[tuple[int, ...], TensorFile, int, int]]] = {}
    for index, info in metadata.storage_data.items():
        if getattr(index, "offset", None) is None:  # not a tensor
            continue
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightsError(f"{directory / '.metadata'} may only name files beside it, but names {name!r}")
        if name not in files:
            files[name] = TensorFile(directory / name)
        if info.offset < 0 or info.length < 0 or info.offset + info.length > files[name].size:
            raise WeightsError(f"{directory / name} is too short: {index.fqn!r} would be beyond its end")
        chunks.setdefault(index.fqn, []).append((tuple(index.offset), files[name], info.offset, info.length))
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    tree: dict[str, Any] = {}
    left = 0
    for name, entry in metadata.state_dict_metadata.items():
        if "size" not in vars(entry).get("state", {}):
            left += 1
            continue
        tensor = Chunked(_dtype(entry.properties), tuple(entry.size), chunks.get(name, []))
        _insert(tree, paths.get(name) or (name,), tensor)
    return tree, left


def _dtype(properties: Any) -> str:
    """Return a tensor's type from its properties, pickled as a tuple (dtype, layout, …)."""
    state = vars(properties)["state"]
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, str):
        raise ValueError("a tensor without a type")
    return dtype


def _insert(tree: dict[str, Any], path: tuple[Any, ...], tensor: Stored) -> None:
    if len(path) > DEEPEST:
        raise ValueError(f"a tensor lies {len(path)} levels deep")
    *above, last = (str(part) for part in path)
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = tensor
