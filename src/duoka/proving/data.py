"""Compare the training batches of two runs row by row, independent of which rank has read a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from duoka.proving.recording import ROW_DIGEST, Recording

Kind = Literal["batches", "rows", "order", "samples", "values", "ranks"]


@dataclass(frozen=True, slots=True)
class DataGap:
    """The first step with other training data. kind: of the difference; text: the same in words.

    counts: False for floating-point arguments of a model, which may have been computed and differ by rounding.
    """

    step: int
    kind: Kind
    text: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of a batch, merged from all ranks. at: its path in the batch. rows: a digest of each row.

    ordered: True if the order of the rows is known. apart: True if ranks that must have the same tensor do not.
    """

    at: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[str, ...]
    ordered: bool
    apart: bool


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
        found = _gap(step, ours.get(step, []), theirs.get(step, []), is_loader=sources == "loader")
        if found is not None:
            return found
    return None


def _by_step(recording: Recording) -> tuple[str, dict[int, list[_Batch]]]:
    """Group a run's batches by step. Also returns their source: "loader", or else "model" for arguments of models."""
    ranks = list(recording.batches())
    lines = [line for rank in ranks for line in rank]
    source = "loader" if any(line["source"] == "loader" for line in lines) else "model"
    found: dict[int, list[_Batch]] = {}
    own = [[line for line in rank if line["source"] == source] for rank in ranks]
    for same in zip(*own, strict=False):
        found.setdefault(same[0]["step"], []).append(_merged(same))
    return source, found


def _merged(ranks: Sequence[dict[str, Any]]) -> _Batch:
    """Merge the rows of all ranks into one batch."""
    columns = zip(*(line["leaves"] for line in ranks), strict=False)
    return _Batch(ranks[0]["line"], tuple(_leaf(column) for column in columns), ranks[0]["values"])


def _leaf(ranks: Sequence[dict[str, Any]]) -> _Leaf:
    first = ranks[0]
    rows = [leaf["rows"] for leaf in ranks]
    if first["kind"] == "whole":
        text, apart = rows[0], any(it != rows[0] for it in rows)
    else:
        text, apart = "".join(rows), False
    digests = tuple(text[at : at + ROW_DIGEST] for at in range(0, len(text), ROW_DIGEST))
    return _Leaf(first["at"], first["dtype"], tuple(first["shape"]), digests, first["kind"] != "own", apart)


def _gap(step: int, ours: list[_Batch], theirs: list[_Batch], is_loader: bool) -> DataGap | None:
    for batch in theirs:
        for leaf in batch.leaves:
            if leaf.apart:
                what = f"the ranks were not given the same {_name(leaf)} at {batch.line}"
                return DataGap(step, "ranks", what, is_loader)
    if len(ours) != len(theirs):
        return DataGap(step, "batches", f"{len(ours)} and {len(theirs)} batches", is_loader)
    for one, other in zip(ours, theirs, strict=True):
        if len(one.leaves) != len(other.leaves):
            return DataGap(
                step, "batches", f"{len(one.leaves)} and {len(other.leaves)} tensors in a batch", is_loader
            )
        for leaf, its in zip(one.leaves, other.leaves, strict=True):
            found = _leaf_gap(leaf, its)
            if found is not None:
                counts = is_loader or not leaf.dtype.startswith(("torch.float", "torch.bfloat", "torch.complex"))
                return DataGap(step, found[0], f"{found[1]} at {one.line}", counts)
        if one.values != other.values:
            return DataGap(step, "values", f"what is no tensor in a batch at {one.line}", is_loader)
    return None


def _leaf_gap(one: _Leaf, other: _Leaf) -> tuple[Kind, str] | None:
    """Compare one tensor of two batches."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return "rows", f"rows of {list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
    if len(one.rows) != len(other.rows):
        return "rows", f"{len(one.rows)} and {len(other.rows)} rows in {_name(one)}"
    if one.rows == other.rows:
        return None
    extra = sum((Counter(one.rows) - Counter(other.rows)).values())
    if extra == 0:
        return ("order", f"the same rows of {_name(one)} in another order") if one.ordered and other.ordered else None
    at = next(row for row, (a, b) in enumerate(zip(one.rows, other.rows, strict=True)) if a != b)
    return "samples", f"{extra:,} of {len(one.rows):,} rows of {_name(one)} are others, the first in row {at}"


def _name(leaf: _Leaf) -> str:
    return f"batch{leaf.at}"
