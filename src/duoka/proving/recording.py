"""The files of one recorded run: written by its ranks, read by the command process.

    steps.jsonl          one line for each state: before the first step, and after each
    tensors.bin          the bytes of all tensors; an unchanged tensor is not written again
    batches-RANK.jsonl   one line for each batch of this rank

Read without torch: types that numpy does not have are written as float32, which holds them exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from duoka.errors import RunError
from duoka.trials.observer import opened

if TYPE_CHECKING:
    from torch import Tensor

TensorKind = Literal["parameter", "buffer", "gradient"]
STEPS, TENSORS = "steps.jsonl", "tensors.bin"
ROW_DIGEST = 16  # characters of the digest of a batch's row
_AS_NUMPY = {"bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64", "complex64", "complex128"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a state, stored in `tensors.bin`. dtype: torch's name; stored: numpy's name. digest: of its bytes.

    kind: a forward pass may have changed a buffer before the first step; a gradient is that which made the step.
    """

    name: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    start: int
    digest: str
    kind: TensorKind


@dataclass(frozen=True)
class StepState:
    """The state after one step; step 0 is the state before the first.

    losses: of the backward passes since the step before.
    """

    step: int
    losses: tuple[float, ...]
    tensors: dict[str, TensorEntry]


class RecordingWriter:
    """Writes the states of a run, on rank 0. steps: expected number, to check the disk's space early."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._last: dict[str, TensorEntry] = {}
        self._gradients: dict[str, TensorEntry] = {}  # of the next step
        self._size = 0
        self._index = opened(folder / STEPS)
        self._data = opened(folder / TENSORS, "wb")

    def write_gradients(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Write the gradients of parameters, by the parameters' names: they belong to the next state."""
        named = ((f"gradient of {name}", gradient) for name, gradient in gradients)
        self._gradients = {name: self._entry(name, gradient, "gradient") for name, gradient in named}

    def write(self, step: int, losses: Iterable[float], tensors: Iterable[tuple[str, Tensor, TensorKind]]) -> None:
        """Write a state. Raises RunError if the disk has too little space for the whole recording."""
        entries = self._gradients | {name: self._entry(name, tensor, kind) for name, tensor, kind in tensors}
        self._gradients = {}
        self._data.flush()
        self._last.update(entries)
        line = {"step": step, "losses": list(losses), "tensors": list(map(astuple, entries.values()))}
        self._index.write(json.dumps(line) + "\n")
        self._index.flush()
        if step == 0:
            self._check_space()

    def _entry(self, name: str, tensor: Tensor, kind: TensorKind) -> TensorEntry:
        dtype = str(tensor.dtype).removeprefix("torch.")
        array = _as_array(tensor)
        digest = hashlib.blake2b(array.data, digest_size=16).hexdigest()
        before = self._last.get(name)
        if before is not None and (before.digest, before.shape, before.dtype) == (digest, array.shape, dtype):
            return before
        entry = TensorEntry(name, dtype, array.dtype.name, array.shape, self._size, digest, kind)
        self._data.write(array.data if array.size else b"")
        self._size += array.nbytes
        return entry

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._folder).free
        wanted = 2 * self._size * self._steps  # with gradients
        if wanted > free:
            raise RunError(
                f"recording {self._steps} steps may take {wanted / 1e9:,.1f} GB in {self._folder.parent.parent}, "
                f"where {free / 1e9:,.1f} GB are free; ask for fewer --steps, or set TMPDIR to a larger disk"
            )

    def close(self) -> None:
        self._index.close()
        self._data.close()


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to a contiguous numpy array, in a type that numpy has."""
    import torch

    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if str(tensor.dtype).removeprefix("torch.") not in _AS_NUMPY:
        tensor = tensor.to(torch.float32)
    return np.ascontiguousarray(tensor.cpu().resolve_conj().resolve_neg().numpy()).reshape(tuple(tensor.shape))


@dataclass(frozen=True)
class Recording:
    """A recorded run, read from its folder."""

    folder: Path

    @cached_property
    def states(self) -> list[StepState]:
        """The states, beginning with the one before the first step."""
        path = self.folder / STEPS
        return [_state(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> int:
        return max(len(self.states) - 1, 0)

    def read(self, entry: TensorEntry) -> np.ndarray[Any, Any]:
        """Return a tensor's values, mapped from the file."""
        dtype = np.dtype(entry.stored)
        count = math.prod(entry.shape)
        if count == 0:
            return np.zeros(entry.shape, dtype)
        path = self.folder / TENSORS
        data = np.memmap(path, dtype, "r", offset=entry.start, shape=(count,))
        return np.asarray(data).reshape(entry.shape)

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the recorded batches of each rank, in the order of ranks."""
        rank = 0
        while (path := self.folder / batches_file(rank)).exists():
            yield [json.loads(line) for line in path.read_text().splitlines()]
            rank += 1


def batches_file(rank: int) -> str:
    """Return the name of the file with the batches of a rank."""
    return f"batches-{rank}.jsonl"


def _state(line: dict[str, Any]) -> StepState:
    entries = [replace(TensorEntry(*values), shape=tuple(values[3])) for values in line["tensors"]]
    return StepState(line["step"], tuple(line["losses"]), {entry.name: entry for entry in entries})
