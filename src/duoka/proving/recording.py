"""The files of one recorded run: written by its ranks, read by the command process.

    steps.jsonl          one line for each state: before the first step, and after each
    tensors.npy          all tensors, in numpy's format; an unchanged tensor is not written again
    batches-RANK.jsonl   one line for each batch of this rank

Read without torch: types that numpy does not have are written as float32, which holds them exactly.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from duoka.errors import RunError
from duoka.trials.observer import opened

if TYPE_CHECKING:
    from torch import Tensor

TensorKind = Literal["parameter", "buffer", "gradient"]
STEPS, TENSORS = "steps.jsonl", "tensors.npy"
ROW_DIGEST = 16  # characters of the digest of a batch's row
_AS_NUMPY = {"bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "complex64", "complex128"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a state."""

    name: str
    dtype: str  # torch's name
    shape: str  # as text
    digest: str
    start: int  # where it begins in the file
    kind: TensorKind  # a forward pass may have changed a buffer before the first step


@dataclass(frozen=True)
class StepState:
    """The state after one step; step 0 is the state before the first."""

    step: int
    losses: tuple[float, ...]  # of the backward passes since the step before
    tensors: dict[str, TensorEntry]


class RecordingWriter:
    """Writes the states of a run, on rank 0. steps: expected number, to check the disk's space early."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._known: dict[str, TensorEntry] = {}  # as written last
        self._entries: dict[str, TensorEntry] = {}  # of the next state
        self._index = opened(folder / STEPS)
        self._data = opened(folder / TENSORS, "wb")

    def add(self, tensors: Iterable[tuple[str, Tensor, TensorKind]]) -> None:
        """Write tensors of the next state."""
        for name, tensor, kind in tensors:
            array, dtype = _as_array(tensor), str(tensor.dtype).removeprefix("torch.")
            digest, shape = hashlib.blake2b(array.data, digest_size=16).hexdigest(), str(list(array.shape))
            entry = self._known.get(name)
            if entry is None or (entry.digest, entry.shape, entry.dtype) != (digest, shape, dtype):
                entry = TensorEntry(name, dtype, shape, digest, self._data.tell(), kind)
                np.save(self._data, array)
            self._known[name] = self._entries[name] = entry

    def end(self, step: int, losses: Iterable[float]) -> None:
        """Write the state of the added tensors. Raises RunError if the disk has too little space for all states."""
        self._data.flush()
        line = {"step": step, "losses": list(losses), "tensors": list(map(astuple, self._entries.values()))}
        self._index.write(json.dumps(line) + "\n")
        self._index.flush()
        self._entries = {}
        if step > 0:
            return
        free = shutil.disk_usage(self._folder).free
        wanted = 2 * self._data.tell() * self._steps  # with gradients
        if wanted > free:
            raise RunError(
                f"recording {self._steps} steps may take {wanted / 1e9:,.1f} GB in {self._folder.parent.parent}, "
                f"where {free / 1e9:,.1f} GB are free; ask for fewer --steps, or set TMPDIR to a larger disk"
            )

    def close(self) -> None:
        self._index.close()
        self._data.close()


def plain_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the CPU, dense, not quantized and not lazily conjugated or negated."""
    import torch

    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg()


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to a contiguous numpy array, in a type that numpy has."""
    tensor = plain_values(tensor)
    if str(tensor.dtype).removeprefix("torch.") not in _AS_NUMPY:
        tensor = tensor.float()
    return np.ascontiguousarray(tensor.numpy()).reshape(tuple(tensor.shape))  # which adds a dimension to a scalar


@dataclass(frozen=True)
class Recording:
    """A recorded run, read from its folder."""

    folder: Path

    @cached_property
    def states(self) -> list[StepState]:
        """The states, beginning with the one before the first step."""
        path, states = self.folder / STEPS, []
        for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            entries = {values[0]: TensorEntry(*values) for values in line["tensors"]}
            states.append(StepState(line["step"], tuple(line["losses"]), entries))
        return states

    @property
    def steps(self) -> int:
        return max(len(self.states) - 1, 0)

    def read(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        """Return a tensor's values, mapped from the file."""
        with open(self.folder / TENSORS, "rb") as file:
            file.seek(entry.start)
            np.lib.format.read_magic(file)  # np.load(mmap_mode=…) maps only the first array of a file
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            return np.memmap(file, dtype, "r", file.tell(), shape)

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the recorded batches of each rank, in the order of ranks."""
        rank = 0
        while (path := self.folder / batches_file(rank)).exists():
            yield [json.loads(line) for line in path.read_text().splitlines()]
            rank += 1


def batches_file(rank: int) -> str:
    """Return the name of the file with the batches of a rank."""
    return f"batches-{rank}.jsonl"
