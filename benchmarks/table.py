"""What a benchmark yields: comparisons (`Row`) and findings (`Finding`), and the table that is printed of them."""

from __future__ import annotations

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
    def spread(self) -> tuple[float, float]:
        """The least and the greatest ratio, round by round where both were measured in the same rounds."""
        if len(self.this.values) == len(self.against.values):
            ratios = [a / b for a, b in zip(self.this.values, self.against.values, strict=True)]
        else:
            ratios = [a / self.against.median for a in self.this.values]
        return min(ratios), max(ratios)

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


@dataclass(frozen=True)
class Finding:
    """What is no time. `who`: duoka or a peer. `found`: in words. `holds`: False where duoka does not as it must."""

    what: str
    who: str
    found: str
    holds: bool = True

    def cells(self) -> tuple[str, ...]:
        return self.what, self.who, self.found, "" if self.holds else "MISSED"


def show(found: Iterable[Row | Absent | Finding]) -> None:
    """Print what was found: of times medians, with the range of what was measured in brackets."""
    found = list(found)
    _columns([HEAD, *(it.cells() for it in found if not isinstance(it, Finding))])
    if findings := [it.cells() for it in found if isinstance(it, Finding)]:
        print()
        _columns(findings)


def _columns(lines: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
