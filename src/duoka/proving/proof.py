"""All runs of a proof, one after the other, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duoka.proving import causes
from duoka.proving.bounds import Bound, Judged, Verdict, judge, meets, worse
from duoka.proving.causes import Unsteady
from duoka.proving.comparing import Comparison, compare
from duoka.proving.recording import Recording
from duoka.proving.sides import Side, Studio
from duoka.trials.stage import NoSteps, TrialFailed, stage

SAME_LOSS = 0.01  # of the first step's loss, which nothing has amplified: rounding parts it by less
REFERENCES = 2  # runs that only rounding parts from the first


@dataclass(frozen=True)
class Asked:
    """What is to be proved: that each of `others` computes what `first` does, for so many steps.

    references: the first run with nothing but rounding changed; what they do bounds what rounding may do.
    """

    first: Side
    others: tuple[Side, ...]
    steps: int
    seed: int
    want: Verdict
    log_dir: Path | None

    @property
    def references(self) -> tuple[Side, ...]:
        """Whatever gives rounding errors as another order of addition does may stand here."""
        return tuple(self.first.nudged(number) for number in range(REFERENCES))


@dataclass(frozen=True)
class Outcome:
    """What came of one side."""

    side: Side
    comparison: Comparison
    judged: Judged
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """What was found. bound: None where all had the same bits, and nobody asked what rounding may do."""

    asked: Asked
    steps: int
    outcomes: tuple[Outcome, ...]
    bound: Bound | None

    @property
    def verdict(self) -> Verdict:
        """The worst of all sides'."""
        found: Verdict = "bits"
        for outcome in self.outcomes:
            found = worse(found, outcome.judged.verdict)
        return found

    @property
    def holds(self) -> bool:
        """Whether every side is what was wanted."""
        return all(meets(outcome.judged, self.asked.want) for outcome in self.outcomes)


def prove(asked: Asked, say: Callable[[str], None]) -> Proof:
    """Run all that has to be run. say: told what is going on.

    Raises:
        TrialFailed: the script failed on one of the sides.
        NoSteps: it made no step that could be seen.
        Stopped: a signal asked for an end. Nothing is left behind.
    """
    with stage("prove", asked.log_dir) as here:
        studio = Studio(here, asked.steps, asked.seed)
        with _told(asked.first, say), studio.recorded(asked.first) as first:
            pass_on = _Pass(studio, first, say)
            return _compare_all(asked, pass_on)


class _Pass:
    """Runs sides and compares them with the first run."""

    def __init__(self, studio: Studio, first: Recording, say: Callable[[str], None]) -> None:
        self._studio, self.first, self._say = studio, first, say

    def __call__(self, side: Side) -> Comparison:
        with _told(side, self._say), self._studio.recorded(side) as recording:
            comparison = compare(self.first, recording)
            self._studio.stage.check()
            return comparison


@contextmanager
def _told(side: Side, say: Callable[[str], None]) -> Iterator[None]:
    say(f"running {side.name}")
    yield


def _compare_all(asked: Asked, again: _Pass) -> Proof:
    _check_steps(asked.first, again.first)
    compared = [(side, again(side)) for side in asked.others]
    if all(comparison.same_bits for _, comparison in compared):
        same = [Outcome(side, found, judge(found, Bound([])), ()) for side, found in compared]
        return Proof(asked, again.first.steps, tuple(same), None)
    unsteady, bound = causes.of_itself(asked.first, again(asked.first.again())), Bound([])
    if unsteady.verdict != "different":  # what chance does would be taken for what rounding does
        bound = Bound([*(again(side) for side in asked.references), *_in_two_parts(asked, again)])
    outcomes = [_outcome(asked, side, found, bound, unsteady, again) for side, found in compared]
    return Proof(asked, again.first.steps, tuple(outcomes), bound)


def _in_two_parts(asked: Asked, again: _Pass) -> list[Comparison]:
    """The first run with its batch added up in another order, if it can be cut into parts.

    With other data (`exact` seeds augmentation by sample) or other steps it would show more than rounding; and where
    its first loss is another, which duoka has computed in parts, it would excuse what it should find.
    """
    try:
        found = again(asked.first.in_two_parts())
    except TrialFailed:
        return []
    same = found.data is None and found.steps[0] == found.steps[1]
    return [found] if same and begins_alike(found) else []


def begins_alike(found: Comparison) -> bool:
    """Whether two runs of the same script have the same loss in their first step, up to rounding."""
    one, other = (losses[0] if losses else math.nan for losses in found.losses)
    return not abs(one - other) > SAME_LOSS * max(abs(one), abs(other))


def _outcome(asked: Asked, side: Side, found: Comparison, bound: Bound, unsteady: Unsteady, again: _Pass) -> Outcome:
    judged = judge(found, bound)
    why: list[str] = []
    if judged.verdict == "bits":
        return Outcome(side, found, judged, ())
    if unsteady.text:
        why.append(unsteady.text)
    if judged.verdict == "different" and unsteady.verdict != "different":
        why += causes.of_difference(side, found, bound, again)
    elif not meets(judged, asked.want) and not unsteady.text:
        why.append("sums over the batch are added in another order on other devices, or by another number of threads")
    if judged.verdict == "different" and not why and bound.amplified is not None:
        why.append(causes.amplification(bound.amplified))
    return Outcome(side, found, judged, tuple(why))


def _check_steps(side: Side, recording: Recording) -> None:
    if recording.steps == 0:
        raise NoSteps(side.name, "compare")
