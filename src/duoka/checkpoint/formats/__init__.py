"""The file formats of weights: what they share, and one module per format, in the order of `read`.

Each module has `matches(path)`, which examines the content, not the name, and `read(path, objects)`, which returns
names, types and shapes without reading the tensors' data. Nothing here needs torch before data are read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from duoka.errors import OptionError, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from duoka.view.tensor.batch import BatchTensor

# Treatment of objects in a pickle that are neither tensors nor plain values: refuse the file, or read them as inert
# stand-ins. In no case does their code run.
Objects = Literal["refuse", "inert"]

# torch's name of a type -> (its code in safetensors, bytes of one element)
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "complex128": ("C128", 16),  # safetensors has no code for it: two F64 each
}


class Stored(ABC):
    """A tensor in a file."""

    dtype: str  # torch's name, such as float32
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return self.numel * DTYPES.get(self.dtype, ("", 1))[1]  # the others, such as qint8, have one byte

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor, on the CPU. It may share memory with the file: copy it before writing into it."""

    def read_like(self, like: Tensor) -> Tensor:
        """Return the tensor, or, if `like` is sharded, this rank's part of it on the device of `like`."""
        return part_of(self.read(), like)

    def read_into(self, target: Tensor) -> None:
        """Copy the values into `target`, of the same shape; type and device stay the target's."""
        target.copy_(self.read_like(target))


class LoadedTensor(Stored):
    """A tensor that is in memory, or mapped from a file by torch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)

    def read(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class FileContents:
    """The contents of a file or directory, whose tensors are not read yet."""

    path: Path
    format: str  # its name
    tree: Any  # dicts, lists and values as saved, with tensors as `Stored`
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the file
    notes: tuple[str, ...] = ()  # remarks for the user about the reading
    # Finds damage that reading does not; raises WeightsError or CheckpointError.
    check: Callable[[], None] = lambda: None

    def tensors(self) -> dict[str, Stored]:
        """Return all tensors by their path in the tree, joined by dots."""
        return dict(_leaves(self.tree))


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Stored]]:
    if isinstance(node, Stored):
        yield at, node
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, value in items:
        yield from _leaves(value, f"{at}.{key}" if at else str(key))


def read(path: str | Path, objects: Objects = "refuse") -> FileContents:
    """Read the contents of a file or directory of any supported format.

    objects: "refuse" rejects pickles that contain objects of unknown classes; "inert" reads them with stand-ins that
    run no code. Raises OptionError if it has another value; WeightsError if the file does not exist, has an unknown
    format, or is damaged; UnsafePickle if the pickle would run code.
    """
    from duoka.checkpoint.formats import dcp, directories, pickles, safetensors

    if objects not in ("refuse", "inert"):
        raise OptionError("objects", objects, "'refuse' or 'inert'")
    path = Path(path)
    try:
        # A model that was saved in several files is found by the name of one.
        if not path.exists() and path.with_name(f"{path.name}.index.json").is_file():
            path = path.with_name(f"{path.name}.index.json")
        if not path.exists():
            raise WeightsError(f"there is no file {str(path)!r}{_near(path)}")
        # Safetensors before pickles: the length of a header can begin with a pickle's first byte.
        for module in (dcp, directories, safetensors, pickles):
            if module.matches(path):
                return module.read(path, objects)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise WeightsError(f"{path} cannot be read: {error}") from error
    raise WeightsError(_unknown(path))


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no directory {str(path.parent)!r} either"
    close = get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / close[0])!r}?" if close else ""


def _unknown(path: Path) -> str:
    known = "safetensors, torch.save's files, sharded files with an index, DCP directories, duoka checkpoints"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        return f"{path} holds no weights in a format that duoka knows ({listed or 'it is empty'}); it reads {known}"
    if path.stat().st_size == 0:
        return f"{path} is empty (0 bytes): its writing was cut short, or the disk was full"
    with open(path, "rb") as file:
        head = file.read(200)
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the file itself; get that by `git lfs pull`"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return f"{path} is a web page, not weights: the download went wrong"
    if head.startswith(b"\x89HDF"):
        return f"{path} is an HDF5 file (Keras), which duoka does not read; it reads {known}"
    return f"{path} has no format that duoka knows (it begins with {head[:8]!r}); it reads {known}"


# Tensors in memory, and the parts of them that ranks hold.


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, or this rank's part of it if `like` is sharded. No communication."""
    from duoka.private.torch import is_dtensor
    from duoka.sharding.parameter import shard_like
    from duoka.view.tensor.batch import BatchTensor

    if isinstance(like, BatchTensor):
        return shard_like(tensor, like)
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    # Without a source rank nothing is sent: each rank has read the tensor.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor that is not empty; writable."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def is_plain_memory(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor holds its values in order."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # another class may keep its values elsewhere
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_sharded(value: Any) -> bool:
    """Return True for a tensor whose rows are divided over ranks (with hsdp, over those of each machine)."""
    from duoka.view.tensor.batch import BatchTensor

    if not isinstance(value, BatchTensor):
        return False
    spec = value._spec
    return spec.view.of_parameters and spec.outer == 1 == spec.inner


class Span(NamedTuple):
    """Bytes of a tensor, or of a file, that one rank holds."""

    at: int  # offset in the tensor or the file
    start: int  # offset in the rank's rows
    size: int  # in bytes
    name: Any = None  # of the tensor


def runs_of(tensor: BatchTensor, itemsize: int, rank: int | None = None) -> list[Span]:
    """Return the contiguous byte ranges that a rank's rows (default: this rank's) occupy in a sharded tensor.

    There is one range if the tensor is sharded along its first dimension; none if the rank has no elements.
    itemsize: bytes per element.
    """
    spec, shape = tensor._spec, tensor.shape
    row = math.prod(shape[spec.dim + 1 :]) * itemsize
    first, end = (row * bound for bound in spec.partition.bounds(spec.partition.rank if rank is None else rank))
    size = end - first
    count = math.prod(shape[: spec.dim]) if size else 0
    return [Span(number * shape[spec.dim] * row + first, number * size, size) for number in range(count)]
