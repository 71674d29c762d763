"""Tensors as the bytes of a safetensors file."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from duoka.checkpoint.disk import Data
from duoka.checkpoint.formats.safetensors import WIDENED
from duoka.checkpoint.stored import DTYPES, bytes_of, is_plain_memory
from duoka.errors import WeightsError

LARGE = 64 << 20  # bytes from which several threads copy


@dataclass(frozen=True)
class Layout:
    """Positions of tensors in a file.

    header: all bytes before the data. places: offset of each tensor in the data.
    """

    header: bytes
    places: Mapping[str, int]
    size: int


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Compute the layout in the order of the safetensors library: large elements first, for alignment, then by name.

    Raises:
        WeightsError: a tensor is sparse, quantised or on the meta device, and so has no plain data.
    """
    facts = {name: (*_code(name, tensor), list(tensor.shape)) for name, tensor in tensors.items()}
    widened = sorted(name for name, (code, *_) in facts.items() if code == "C128")
    if widened:
        metadata = {**metadata, WIDENED: json.dumps(widened)}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-facts[name][1], name)):
        code, size, shape = facts[name]
        places[name], end = at, at + math.prod(shape) * size
        header[name] = {
            "dtype": "F64" if code == "C128" else code,
            "shape": [*shape, 2] if code == "C128" else shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, places, at)


def _code(name: str, tensor: Tensor) -> tuple[str, int]:
    known = DTYPES.get(str(tensor.dtype)[6:])
    if known is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
        raise WeightsError(f"{name!r} is {kind}, which safetensors cannot store; a .pth file can")
    return known


def straight(layout: Layout, tensors: Iterable[Tensor]) -> Iterator[Data]:
    """Yield the bytes of the file, without a copy if memory allows. tensors: in the order of `places`."""
    yield layout.header
    for tensor in tensors:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            yield bytes_of(tensor)
        del tensor  # before the next one comes


class Image:
    """A copy of tensors in memory, in the layout of the file, so that training can go on while it is written.

    The memory uses huge pages if available: page faults are most of the cost of a copy.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.size = layout, layout.size
        self._memory = mmap.mmap(-1, max(layout.size, 1))
        with suppress(AttributeError, OSError, ValueError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def copy_from(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        """Copy tensors from any devices. Their layout must be no larger than the original one."""
        self.layout = layout
        plain = {name: tensors[name] for name in layout.places if is_plain_memory(tensors[name])}
        threads = min(4, torch.get_num_threads()) if layout.size > LARGE else 1
        with ThreadPoolExecutor(threads, "duoka-copy") as pool:
            for name in layout.places:
                if name not in plain:
                    self.put(name, tensors[name])
            # Faster than copy_, whose threads synchronize after each tensor.
            places = [layout.places[name] for name in plain]
            list((pool.map if threads > 1 else map)(self._move, places, plain.values()))

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor of the layout."""
        if tensor.numel():
            at = self.layout.places[name]
            own = self._bytes[at : at + tensor.numel() * tensor.element_size()]
            with torch.no_grad():
                own.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def _move(self, at: int, tensor: Tensor) -> None:
        ctypes.memmove(self._bytes.data_ptr() + at, tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def parts(self) -> tuple[Data, ...]:
        """Return the bytes of the file."""
        return self.layout.header, self._bytes.numpy().data[: self.layout.size]
