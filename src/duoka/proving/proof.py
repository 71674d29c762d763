"""Make all runs of a proof, one after the other, and compare them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from duoka.proving import causes
from duoka.proving.bounds import Bound, Judgement, Verdict, judge, meets, worse
from duoka.proving.causes import RepeatResult
from duoka.proving.comparing import RunComparison, compare
from duoka.proving.recording import Recording
from duoka.proving.runs import RunRecorder, ScriptRun
from duoka.trials.runner import NoSteps, TrialFailed, trial_runner

SAME_LOSS = 0.01  # of the first step's loss: rounding changes it by less
REFERENCES = 2  # runs that differ from the first by rounding only


@dataclass(frozen=True)
class ProofRequest:
    """The proof to make: each of `others` must compute what `first` does, for `steps` steps.

    want: the worst verdict that is accepted.
    """

    first: ScriptRun
    others: tuple[ScriptRun, ...]
    steps: int
    seed: int
    want: Verdict
    log_dir: Path | None

    @property
    def references(self) -> tuple[ScriptRun, ...]:
        """The first run with rounding changed; their differences bound what rounding may do."""
        return tuple(self.first.nudged(number) for number in range(REFERENCES))


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    run: ScriptRun
    comparison: RunComparison
    judged: Judgement
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """The result. bound: None if all runs had the same bits."""

    request: ProofRequest
    steps: int
    outcomes: tuple[Outcome, ...]
    bound: Bound | None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict."""
        found: Verdict = "bits"
        for outcome in self.outcomes:
            found = worse(found, outcome.judged.verdict)
        return found

    @property
    def holds(self) -> bool:
        """True if every run has at least the wanted verdict."""
        return all(meets(outcome.judged, self.request.want) for outcome in self.outcomes)


def prove(request: ProofRequest, say: Callable[[str], None]) -> Proof:
    """Run the script as requested, compare the runs, and return the proof.

    say: called with progress messages.

    Raises:
        TrialFailed: the script failed in one of the runs.
        NoSteps: the script made no optimizer step.
        Stopped: a signal asked this command to end; all files are removed.
    """
    with trial_runner("prove", request.log_dir) as trials:
        recorder = RunRecorder(trials, request.steps, request.seed)
        say(f"running {request.first.name}")
        with recorder.record(request.first) as first:
            return _compare_all(request, _Comparer(recorder, first, say))


class _Comparer:
    """Makes runs and compares them with the first run."""

    def __init__(self, recorder: RunRecorder, first: Recording, say: Callable[[str], None]) -> None:
        self._recorder, self.first, self._say = recorder, first, say

    def __call__(self, run: ScriptRun) -> RunComparison:
        self._say(f"running {run.name}")
        with self._recorder.record(run) as recording:
            comparison = compare(self.first, recording)
            self._recorder.trials.check()
            return comparison


def _compare_all(request: ProofRequest, compare_run: _Comparer) -> Proof:
    _check_steps(request.first, compare_run.first)
    compared = [(run, compare_run(run)) for run in request.others]
    if all(comparison.same_bits for _, comparison in compared):
        same = [Outcome(run, found, judge(found, Bound([])), ()) for run, found in compared]
        return Proof(request, compare_run.first.steps, tuple(same), None)
    repeat, bound = causes.of_itself(request.first, compare_run(request.first.repeated())), Bound([])
    if repeat.verdict != "different":  # else unseeded randomness would count as rounding
        bound = Bound([*(compare_run(run) for run in request.references), *_in_two_parts(request, compare_run)])
    outcomes = [_outcome(request, run, found, bound, repeat, compare_run) for run, found in compared]
    return Proof(request, compare_run.first.steps, tuple(outcomes), bound)


def _in_two_parts(request: ProofRequest, compare_run: _Comparer) -> list[RunComparison]:
    """Run the first plan with the batch added up in another order, if `exact` can run it.

    Ignored if it differs in data (`exact` seeds augmentation by sample), in steps or in its first loss: it would then
    show, and so excuse, more than rounding.
    """
    try:
        found = compare_run(request.first.in_two_parts())
    except TrialFailed:
        return []
    same = found.data is None and found.steps[0] == found.steps[1]
    return [found] if same and begins_alike(found) else []


def begins_alike(found: RunComparison) -> bool:
    """Return True if two runs have the same loss in their first step, up to rounding."""
    one, other = (losses[0] if losses else math.nan for losses in found.losses)
    return not abs(one - other) > SAME_LOSS * max(abs(one), abs(other))


def _outcome(
    request: ProofRequest,
    run: ScriptRun,
    found: RunComparison,
    bound: Bound,
    repeat: RepeatResult,
    compare_run: _Comparer,
) -> Outcome:
    judged = judge(found, bound)
    why: list[str] = []
    if judged.verdict == "bits":
        return Outcome(run, found, judged, ())
    if repeat.text:
        why.append(repeat.text)
    if judged.verdict == "different" and repeat.verdict != "different":
        why += causes.of_difference(run, found, bound, compare_run)
    elif not meets(judged, request.want) and not repeat.text:
        why.append("sums over the batch are added in another order on other devices, or by another number of threads")
    if judged.verdict == "different" and not why and bound.amplified is not None:
        why.append(causes.amplification(bound.amplified))
    return Outcome(run, found, judged, tuple(why))


def _check_steps(run: ScriptRun, recording: Recording) -> None:
    if recording.steps == 0:
        raise NoSteps(run.name, "compare")
