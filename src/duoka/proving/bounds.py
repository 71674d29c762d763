"""Which difference is rounding, and which is not.

A number of a run may be as far from the other run's as the largest of

    ULPS units in the last place of the tensor's largest number     what storing it rounds away, step after step
    OF_MOVE of how far the steps have moved the tensor              what adding up a gradient in another order does
    TIMES what it is apart in the reference runs, up to that step   what the script itself makes of rounding

where a reference run is the first run again, with nothing but rounding changed. Whole numbers must be equal, unless
they are not in a reference run either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from duoka.proving.comparing import Comparison, Gap

Verdict = Literal["bits", "rounding", "different"]
RANKING: tuple[Verdict, ...] = ("bits", "rounding", "different")  # from the best to the worst

ULPS = 16
OF_MOVE = 1e-4
TIMES = 8
AMPLIFIED = 0.02  # of how far a tensor has moved, by rounding alone: beyond this, a script amplifies rounding


class Bound:
    """What rounding may do to one script. references: the first run compared with its reference runs."""

    def __init__(self, references: Sequence[Comparison]) -> None:
        self._references = references
        self._grown: dict[tuple[int, str], float] = {}
        for reference in references:
            for gap in reference.gaps:
                place = (gap.step, gap.name)
                self._grown[place] = max(self._grown.get(place, 0.0), gap.largest)

    def allowed(self, gap: Gap) -> float:
        """How far apart a tensor may be after a step."""
        if gap.problem:
            return 0.0
        of_type = max(ULPS * gap.epsilon * gap.size, OF_MOVE * gap.moved) if gap.epsilon else 0.0
        return max(of_type, TIMES * self.grown(gap.step, gap.name))

    def grown(self, step: int, name: str) -> float:
        """How far rounding alone has taken a tensor in the reference runs, up to a step."""
        return max((self._grown.get((at, name), 0.0) for at in range(step + 1)), default=0.0)

    @property
    def amplified(self) -> Gap | None:
        """The first tensor, of the first step, that rounding alone takes far from where it was."""
        found = [gap for reference in self._references for gap in reference.gaps if self._is_amplified(gap)]
        return min(found, key=lambda gap: (gap.step, -gap.largest), default=None)

    def _is_amplified(self, gap: Gap) -> bool:
        stored = max(ULPS * gap.epsilon * gap.size, 2 * self.grown(0, gap.name))  # at first it was moved by hand
        return gap.step > 0 and gap.epsilon > 0 and gap.largest > max(stored, AMPLIFIED * gap.moved)


@dataclass(frozen=True)
class Judged:
    """One comparison, judged.

    parts: where the bits first part. first: where they part by more than rounding, and `allowed` there. worst: the
    gap that is largest to its tensor's numbers. why: what parts the runs beside tensors, in words.
    """

    verdict: Verdict
    parts: Gap | None
    first: Gap | None
    allowed: float
    worst: Gap | None
    why: str


def judge(comparison: Comparison, bound: Bound) -> Judged:
    """What two runs are to each other, and where they part."""
    gaps = comparison.gaps
    worst = max(gaps, key=lambda gap: (gap.relative, gap.largest), default=None)
    parts = gaps[0] if gaps else None
    if comparison.same_bits:
        return Judged("bits", None, None, 0.0, None, "")
    first = next((gap for gap in gaps if not gap.largest <= bound.allowed(gap)), None)
    why = _why(comparison)
    verdict: Verdict = "different" if first is not None or why else "rounding"
    return Judged(verdict, parts, first, bound.allowed(first) if first else math.nan, worst, why)


def _why(comparison: Comparison) -> str:
    one, other = comparison.steps
    if comparison.data is not None and comparison.data.counts:
        return f"other data in step {comparison.data.step}: {comparison.data.text}"
    return f"{one} and {other} steps were made" if one != other else ""


def worse(one: Verdict, other: Verdict) -> Verdict:
    """The worse of two verdicts."""
    return max(one, other, key=RANKING.index)


def meets(judged: Judged, wanted: Verdict) -> bool:
    """Whether a verdict is at least the one that is wanted."""
    return RANKING.index(judged.verdict) <= RANKING.index(wanted)
