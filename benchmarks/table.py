"""The one table that all benchmarks end in."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.runs import Samples

HEAD = ("what", "this", "against", "ratio", "bar", "")


@dataclass(frozen=True)
class Row:
    """One comparison. `bar`: the greatest ratio allowed; None where the figure is only to be known."""

    what: str
    this: Samples
    against: Samples
    bar: float | None = None

    @property
    def ratio(self) -> float:
        """What `this` takes of what `against` takes."""
        return self.this.median / self.against.median

    @property
    def holds(self) -> bool:
        """Whether the bar, if there is one, is kept."""
        return self.bar is None or self.ratio <= self.bar

    def cells(self) -> tuple[str, ...]:
        bar = "" if self.bar is None else f"{self.bar:.2f}"
        verdict = "" if self.bar is None else "holds" if self.holds else "MISSED"
        return self.what, str(self.this), str(self.against), f"{self.ratio:.2f}", bar, verdict


@dataclass(frozen=True)
class Absent:
    """A comparison with a library that is not installed."""

    what: str
    holds: bool = True

    def cells(self) -> tuple[str, ...]:
        return self.what, "", "not installed", "", "", ""


def show(rows: Iterable[Row | Absent]) -> None:
    """Print the table: medians, with the range of what was measured in brackets."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians [range]")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
