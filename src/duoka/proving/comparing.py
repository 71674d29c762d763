"""Compare two recordings step by step and tensor by tensor, holding one piece of a tensor in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from duoka.proving.data import DataGap, compare_data
from duoka.proving.recording import Recording, TensorEntry, TensorKind

PIECE = 1 << 22  # numbers in a piece

# The distance from 1 to the next number.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7} | {
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of one tensor after one step.

    largest: between two of its numbers; infinite if one is not finite. size: its largest number in either run. moved:
    the distance it moved from its start, in the first run; of a gradient, which starts at 0, its largest number.
    epsilon: of its type; 0 for whole numbers. problem: the reason why it cannot be compared.
    """

    step: int
    name: str
    largest: float
    size: float
    moved: float
    epsilon: float
    problem: str = ""
    kind: TensorKind = "parameter"

    @property
    def relative(self) -> float:
        """The difference divided by the tensor's largest number."""
        return self.largest / self.size if self.size and self.largest < math.inf else self.largest


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs. gaps: in the order of steps and tensors. steps: of each run."""

    gaps: tuple[Gap, ...]
    steps: tuple[int, int]
    data: DataGap | None
    losses: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def same_bits(self) -> bool:
        """True if everything recorded has the same bits."""
        return not self.gaps and self.steps[0] == self.steps[1] and (self.data is None or not self.data.counts)


def compare(first: Recording, second: Recording) -> RunComparison:
    """Compare two recorded runs."""
    gaps = tuple(gap for gap in _gaps(first, second))
    losses = tuple(state.losses[-1] if state.losses else math.nan for state in first.states[1:])
    others = tuple(state.losses[-1] if state.losses else math.nan for state in second.states[1:])
    return RunComparison(gaps, (first.steps, second.steps), compare_data(first, second), (losses, others))


def _gaps(first: Recording, second: Recording) -> Iterator[Gap]:
    if not (first.states and second.states):
        return
    start = first.states[0].tensors
    for state, other in zip(first.states, second.states, strict=False):
        for name, entry in state.tensors.items():
            theirs = other.tensors.get(name)
            if theirs is None:
                yield _problem(state.step, name, "is in the first run only")
            elif (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
                shapes = f"{list(entry.shape)} {entry.dtype} and {list(theirs.shape)} {theirs.dtype}"
                yield _problem(state.step, name, f"is {shapes}")
            elif theirs.digest != entry.digest:
                gap = _gap(state.step, (first, entry), (second, theirs), start.get(name))
                if gap is not None:
                    yield gap
        for name in other.tensors:
            if name not in state.tensors:
                yield _problem(state.step, name, "is in the second run only")


def _problem(step: int, name: str, problem: str) -> Gap:
    return Gap(step, name, math.inf, math.inf, 0.0, 0.0, problem)


def _gap(
    step: int, one: tuple[Recording, TensorEntry], other: tuple[Recording, TensorEntry], start: TensorEntry | None
) -> Gap | None:
    """Compare two tensors whose bytes differ; None if only the bits of NaNs differ."""
    entry = one[1]
    flat, theirs = (recording.read(it).reshape(-1) for recording, it in (one, other))
    begun = one[0].read(start).reshape(-1) if start is not None and start.shape == entry.shape else None
    largest = size = moved = 0.0
    same = True
    for at in range(0, flat.size, PIECE):
        a, b = _wide(flat[at : at + PIECE]), _wide(theirs[at : at + PIECE])
        both = np.isnan(a) & np.isnan(b)
        same = same and np.array_equal(_bits(flat[at : at + PIECE])[~both], _bits(theirs[at : at + PIECE])[~both])
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where(both | (a == b), 0.0, np.abs(a - b))
            way = a if entry.kind == "gradient" else a - a if begun is None else a - _wide(begun[at : at + PIECE])
        largest = max(largest, float(np.nan_to_num(distance, nan=np.inf, posinf=np.inf).max()))
        size = max(size, _largest(a), _largest(b))
        moved = max(moved, _largest(way))
    if same:
        return None
    return Gap(step, entry.name, largest, size, moved, EPSILON.get(entry.dtype, 0.0), kind=entry.kind)


def _wide(piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return piece.astype(np.complex128 if piece.dtype.kind == "c" else np.float64)


def _bits(piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View an array as rows of bytes, one for each number."""
    return np.ascontiguousarray(piece).view(np.uint8).reshape(piece.size, -1)


def _largest(piece: np.ndarray[Any, Any]) -> float:
    """Return the largest finite magnitude."""
    found = np.abs(piece)
    found = found[np.isfinite(found)]
    return float(found.max()) if found.size else 0.0
