"""Limits within which rounding explains a difference.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from duoka.proving.comparing import Gap, RunComparison

Verdict = Literal["bits", "rounding", "different"]
RANKING: tuple[Verdict, ...] = ("bits", "rounding", "different")  # from the best to the worst

ULPS = 16
OF_MOVE = 1e-4
TIMES = 8
AMPLIFIED = 0.02  # of a tensor's movement: if rounding alone differs by more, the script amplifies rounding


class Bound:
    """Limits for one script. references: the first run compared with its reference runs."""

    def __init__(self, references: Sequence[RunComparison]) -> None:
        self._references = references
        self._grown: dict[tuple[int, str], float] = {}
        for reference in references:
            for gap in reference.gaps:
                place = (gap.step, gap.name)
                self._grown[place] = max(self._grown.get(place, 0.0), gap.largest)

    def allowed(self, gap: Gap) -> float:
        """Return the allowed difference of a tensor after a step."""
        if gap.problem:
            return 0.0
        of_type = max(ULPS * gap.epsilon * gap.size, OF_MOVE * gap.moved) if gap.epsilon else 0.0
        return max(of_type, TIMES * self.grown(gap.step, gap.name))

    def grown(self, step: int, name: str) -> float:
        """Return the largest difference of a tensor in the reference runs, up to a step."""
        return max((self._grown.get((at, name), 0.0) for at in range(step + 1)), default=0.0)

    @property
    def amplified(self) -> Gap | None:
        """The first gap at which rounding alone moves a tensor far; None if there is none."""
        found = [gap for reference in self._references for gap in reference.gaps if self._is_amplified(gap)]
        return min(found, key=lambda gap: (gap.step, -gap.largest), default=None)

    def _is_amplified(self, gap: Gap) -> bool:
        stored = max(ULPS * gap.epsilon * gap.size, 2 * self.grown(0, gap.name))  # step 0 differs by the nudge itself
        if gap.kind == "gradient":  # a gradient whose true value is 0 consists of rounding only
            return False
        return gap.step > 0 and gap.epsilon > 0 and gap.largest > max(stored, AMPLIFIED * gap.moved)


@dataclass(frozen=True)
class Judgement:
    """The judgement of one comparison.

    parts: the first gap of any size. first: the first gap beyond rounding, and `allowed` its limit. worst: the
    largest gap relative to its tensor, of parameters and buffers. why: other differences than tensors, in words.
    """

    verdict: Verdict
    parts: Gap | None
    first: Gap | None
    allowed: float
    worst: Gap | None
    why: str


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
    one, other = comparison.steps
    if comparison.data is not None and comparison.data.counts:
        return f"other data in step {comparison.data.step}: {comparison.data.text}"
    return f"{one} and {other} steps were made" if one != other else ""


def worse(one: Verdict, other: Verdict) -> Verdict:
    """Return the worse of two verdicts."""
    return max(one, other, key=RANKING.index)


def meets(judged: Judgement, wanted: Verdict) -> bool:
    """Return True if the verdict is at least as good as the wanted one."""
    return RANKING.index(judged.verdict) <= RANKING.index(wanted)
