"""Differences between the tensors of a file and of a model, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from duoka.checkpoint.names import plain

LONGEST = 20  # rows of each kind
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """Tensors that do not match, with shapes. missing: not in the file. unexpected: not in the model.

    wrong: the model's shape and the file's, or types that cannot be converted.
    """

    missing: Mapping[str, Shape] = field(default_factory=dict)
    unexpected: Mapping[str, Shape] = field(default_factory=dict)
    wrong: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.wrong)

    def table(self) -> str:
        """Return aligned rows: the kind, the name, the shape, and the closest name in the file."""
        near = _nearest(self.missing, self.unexpected)
        rows = [
            ("wrong shape", name, f"{ours} in the model", f"{theirs} in the file")
            for name, (ours, theirs) in self.wrong.items()
        ]
        rows = _first(rows, "wrong shape")
        rows += _first(
            [
                ("missing", name, str(shape), near[name] and f"nearest in the file: {near[name]}")
                for name, shape in self.missing.items()
            ],
            "missing",
        )
        rows += _first(
            [("unexpected", name, str(shape), "") for name, shape in self.unexpected.items()], "unexpected"
        )
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        return "\n".join("  " + line.rstrip() for line in lines)


def _first(rows: Sequence[tuple[str, str, str, str]], kind: str) -> list[tuple[str, str, str, str]]:
    left = len(rows) - LONGEST
    return list(rows) if left <= 0 else [*rows[:LONGEST], (kind, f"… and {left} more", "", "")]


def _nearest(missing: Mapping[str, Shape], unexpected: Mapping[str, Shape]) -> dict[str, str]:
    """Return for each missing name shown the most similar unexpected one, preferring the same shape."""
    near = dict.fromkeys(missing, "")
    for name in list(missing)[:LONGEST]:
        alike = [other for other, shape in unexpected.items() if shape == missing[name]] or list(unexpected)
        best = max(alike[:500], key=lambda other: _likeness(name, other), default="")
        if best and (_likeness(name, best) > 0.4 or unexpected[best] == missing[name]):
            near[name] = f"{best} {unexpected[best]}"
    return near


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, plain(one), plain(other)).ratio()
