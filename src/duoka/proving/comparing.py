"""Compare two recordings by step, tensor and row of data, and judge whether rounding explains a difference.

A number of a run may differ from the other run's by the largest of

    ULPS units in the last place of the tensor's largest number     rounding when it is stored, step after step
    OF_MOVE of how far the steps have moved the tensor,             another order of adding up a gradient
        or of a gradient's largest number
    TIMES the difference in the reference runs, up to that step     amplification by the script itself

where a reference run is the first run again, with only rounding changed. Whole numbers must be equal, unless they
differ in a reference run, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from duoka.proving.recording import ROW_DIGEST, Recording, TensorEntry, TensorKind

PIECE = 1 << 22  # numbers that are compared at once: arrays are mapped from files, and widened to 64 bits

# The distance from 1 to the next number.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7} | {
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of one tensor after one step."""

    step: int
    name: str
    largest: float  # between two of its numbers; infinite if one is not finite
    size: float  # its largest number in either run
    moved: float  # from its start, in the first run; of a gradient, which starts at 0, its largest number
    epsilon: float  # of its type; 0 for whole numbers
    problem: str = ""  # the reason why it cannot be compared
    kind: TensorKind = "parameter"

    @property
    def relative(self) -> float:
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
    gaps = tuple(_gaps(first, second))
    losses = tuple(state.losses[-1] if state.losses else math.nan for state in first.states[1:])
    others = tuple(state.losses[-1] if state.losses else math.nan for state in second.states[1:])
    return RunComparison(gaps, (first.steps, second.steps), compare_data(first, second), (losses, others))


def _gaps(first: Recording, second: Recording) -> Iterator[Gap]:
    if not (first.states and second.states):
        return
    start = first.states[0].tensors
    for state, other in zip(first.states, second.states, strict=False):  # the numbers of steps are compared, too
        for name, entry in state.tensors.items():
            theirs = other.tensors.get(name)
            if theirs is None:
                yield _problem(state.step, name, "is in the first run only")
            elif (theirs.shape, theirs.dtype) != (entry.shape, entry.dtype):
                shapes = f"{entry.shape} {entry.dtype} and {theirs.shape} {theirs.dtype}"
                yield _problem(state.step, name, f"is {shapes}")
            elif theirs.digest != entry.digest:  # else no number is read
                gap = _gap(state.step, (first, entry), (second, theirs), start.get(name))
                if gap is not None:
                    yield gap
        for name in other.tensors:
            if name not in state.tensors:
                yield _problem(state.step, name, "is in the second run only")


def _problem(step: int, name: str, problem: str) -> Gap:
    return Gap(step, name, math.inf, math.inf, 0.0, 0.0, problem)


def _gap(
    step: int, first: tuple[Recording, TensorEntry], second: tuple[Recording, TensorEntry], start: TensorEntry | None
) -> Gap | None:
    """Compare two tensors whose bytes differ; None if only the bits of NaNs differ."""
    entry = first[1]
    flat, other = (recording.read(entry).reshape(-1) for recording, entry in (first, second))
    begun = first[0].read(start).reshape(-1) if start is not None and start.shape == entry.shape else None
    largest = size = moved = 0.0
    same = True
    for at in range(0, flat.size, PIECE):
        a, b = _wide(flat[at : at + PIECE]), _wide(other[at : at + PIECE])
        both = np.isnan(a) & np.isnan(b)
        same = same and np.array_equal(_bits(flat[at : at + PIECE])[~both], _bits(other[at : at + PIECE])[~both])
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN: infinite, below
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
    sizes = np.abs(piece)
    sizes = sizes[np.isfinite(sizes)]
    return float(sizes.max()) if sizes.size else 0.0


Kind = Literal["batches", "rows", "order", "samples", "values", "ranks"]


@dataclass(frozen=True, slots=True)
class DataGap:
    """The first step with other training data."""

    step: int
    kind: Kind  # of the difference
    text: str  # the same in words
    counts: bool = True  # False for floats that a model is given: they may be computed, and differ by rounding


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of a batch, merged from all ranks."""

    at: str  # its path in the batch
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[str, ...]  # a digest of each row
    ordered: bool  # the order of the rows is known
    apart: bool  # ranks that must have the same tensor do not


@dataclass(frozen=True, slots=True)
class _Batch:
    line: str
    leaves: tuple[_Leaf, ...]
    values: str


def compare_data(first: Recording, second: Recording) -> DataGap | None:
    """Compare the batches of the steps that both runs have made; None if they are the same."""
    sources, ours = _by_step(first)
    others, theirs = _by_step(second)
    if sources != others:
        return DataGap(1, "batches", f"one run took its batches from a {sources}, the other from a {others}", False)
    for step in range(1, min(first.steps, second.steps) + 1):
        for kind, text, is_exact in _differences(ours.get(step, []), theirs.get(step, [])):
            return DataGap(step, kind, text, is_exact or sources == "loader")
    return None


def _by_step(recording: Recording) -> tuple[str, dict[int, list[_Batch]]]:
    """Group a run's batches by step. Also returns their source: "loader", or else "model" for arguments of models."""
    ranks = list(recording.batches())
    lines = [line for rank in ranks for line in rank]
    source = "loader" if any(line["source"] == "loader" for line in lines) else "model"
    batches: dict[int, list[_Batch]] = {}
    of_ranks = [[line for line in rank if line["source"] == source] for rank in ranks]
    for same in zip(*of_ranks, strict=False):
        leaves = map(_leaf, zip(*(line["leaves"] for line in same), strict=False))
        batch = _Batch(same[0]["line"], tuple(leaves), same[0]["values"])
        batches.setdefault(same[0]["step"], []).append(batch)
    return source, batches


def _leaf(ranks: Sequence[dict[str, Any]]) -> _Leaf:
    first = ranks[0]
    rows = [leaf["rows"] for leaf in ranks]
    if first["kind"] == "whole":
        text, apart = rows[0], any(of_rank != rows[0] for of_rank in rows)
    else:
        text, apart = "".join(rows), False
    digests = tuple(text[at : at + ROW_DIGEST] for at in range(0, len(text), ROW_DIGEST))
    return _Leaf(first["at"], first["dtype"], tuple(first["shape"]), digests, first["kind"] != "own", apart)


def _differences(ours: list[_Batch], theirs: list[_Batch]) -> Iterator[tuple[Kind, str, bool]]:
    """Yield how the batches of a step differ, and whether in numbers that are not computed, which are exact."""
    for batch in theirs:
        for leaf in batch.leaves:
            if leaf.apart:
                yield "ranks", f"the ranks were not given the same {_name(leaf)} at {batch.line}", False
    if len(ours) != len(theirs):
        yield "batches", f"{len(ours)} and {len(theirs)} batches", False
    for batch, other in zip(ours, theirs, strict=False):
        if len(batch.leaves) != len(other.leaves):
            yield "batches", f"{len(batch.leaves)} and {len(other.leaves)} tensors in a batch", False
        for leaf, other_leaf in zip(batch.leaves, other.leaves, strict=False):
            is_exact = not leaf.dtype.startswith(("torch.float", "torch.bfloat", "torch.complex"))
            for kind, text in _leaf_differences(leaf, other_leaf):
                yield kind, f"{text} at {batch.line}", is_exact
        if batch.values != other.values:
            yield "values", f"what is no tensor in a batch at {batch.line}", False


def _leaf_differences(leaf: _Leaf, other: _Leaf) -> Iterator[tuple[Kind, str]]:
    extra = sum((Counter(leaf.rows) - Counter(other.rows)).values())
    if (leaf.dtype, leaf.shape) != (other.dtype, other.shape):
        yield "rows", f"rows of {list(leaf.shape)} {leaf.dtype} and {list(other.shape)} {other.dtype}"
    elif len(leaf.rows) != len(other.rows):
        yield "rows", f"{len(leaf.rows)} and {len(other.rows)} rows in {_name(leaf)}"
    elif extra:
        at = next(row for row, (a, b) in enumerate(zip(leaf.rows, other.rows, strict=True)) if a != b)
        yield "samples", f"{extra:,} of {len(leaf.rows):,} rows of {_name(leaf)} are others, the first in row {at}"
    elif leaf.rows != other.rows and leaf.ordered and other.ordered:
        yield "order", f"the same rows of {_name(leaf)} in another order"


def _name(leaf: _Leaf) -> str:
    return f"batch{leaf.at}"


Verdict = Literal["bits", "rounding", "different"]
RANKING: tuple[Verdict, ...] = ("bits", "rounding", "different")  # from the best to the worst

ULPS = 16
OF_MOVE = 1e-4
TIMES = 8


class Bound:
    """Limits for one script. references: the first run compared with its reference runs."""

    def __init__(self, references: Sequence[RunComparison]) -> None:
        self._grown: dict[tuple[int, str], float] = {}
        for reference in references:
            for gap in reference.gaps:
                key = (gap.step, gap.name)
                self._grown[key] = max(self._grown.get(key, 0.0), gap.largest)

    def allowed(self, gap: Gap) -> float:
        if gap.problem:
            return 0.0
        of_type = max(ULPS * gap.epsilon * gap.size, OF_MOVE * gap.moved) if gap.epsilon else 0.0
        return max(of_type, TIMES * self.grown(gap.step, gap.name))

    def grown(self, step: int, name: str) -> float:
        """Return the largest difference of a tensor in the reference runs, up to a step."""
        return max((self._grown.get((at, name), 0.0) for at in range(step + 1)), default=0.0)


@dataclass(frozen=True)
class Judgement:
    """The judgement of one comparison."""

    verdict: Verdict
    parts: Gap | None  # the first gap of any size
    first: Gap | None  # the first gap beyond rounding
    allowed: float  # the limit of `first`
    worst: Gap | None  # the largest relative to its tensor, of parameters and buffers
    why: str  # other differences than tensors, in words


def judge(comparison: RunComparison, bound: Bound) -> Judgement:
    """Judge two runs, and find the first gap beyond rounding."""
    gaps = comparison.gaps
    worst = max(
        (gap for gap in gaps if gap.kind != "gradient"), key=lambda gap: (gap.relative, gap.largest), default=None
    )
    parts = gaps[0] if gaps else None
    if comparison.same_bits:
        return Judgement("bits", None, None, 0.0, None, "")
    first = next((gap for gap in gaps if not gap.largest <= bound.allowed(gap)), None)
    why = _why(comparison)
    verdict: Verdict = "different" if first is not None or why else "rounding"
    return Judgement(verdict, parts, first, bound.allowed(first) if first else math.nan, worst, why)


def _why(comparison: RunComparison) -> str:
    first, second = comparison.steps
    if comparison.data is not None and comparison.data.counts:
        return f"other data in step {comparison.data.step}: {comparison.data.text}"
    return f"{first} and {second} steps were made" if first != second else ""


def meets(judged: Judgement, wanted: Verdict) -> bool:
    """Return True if the verdict is at least as good as the wanted one."""
    return RANKING.index(judged.verdict) <= RANKING.index(wanted)
