"""Make all runs of a proof, one after the other, compare them with the first, and find the cause of a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duoka.planning.plan import Kind, Plan
from duoka.proving.comparing import RANKING, Bound, Judgement, RunComparison, Verdict, compare, judge, meets
from duoka.proving.recorder import Recorder
from duoka.proving.recording import Recording
from duoka.trials.runner import NoSteps, TrialFailed, TrialRunner, trial_runner

SAME_LOSS = 0.01  # of the first step's loss: rounding changes it by less
REFERENCES = 2  # runs that differ from the first by rounding only

# Options that change numbers: name, the value that does (None: any), the value that does not, and its effect.
OPTIONS: tuple[tuple[str, str | None, Any, str], ...] = (
    ("batch_norm", "local", "whole", "BatchNorm takes the statistics of each share of the batch"),
    ("randomness", "worker", "whole", "each rank draws its own random numbers inside of models"),
    ("loading", "shared", "auto", "random augmentation is seeded by sample, not drawn from the one stream"),
    ("row_independent", None, (), "a function that it names does not compute each row by itself"),
)


@dataclass(frozen=True)
class ScriptRun:
    """A run to record."""

    name: str  # shown in the table
    plan: Plan
    nudge: int | None = None  # None, or the seed of the directions in which weights are moved

    def nudged(self, seed: int) -> ScriptRun:
        """Return the same run with weights moved in their last place."""
        return ScriptRun(f"{self.name}, nudged ({seed + 1})", self.plan, seed)

    def repeated(self) -> ScriptRun:
        return replace(self, name=f"{self.name}, once more")


def as_python(plan: Plan, threads: int | None) -> ScriptRun:
    """Return the run on the plan's first device: as `python` runs it, or as one rank if the script needs ranks."""
    kind = Kind.PLAIN if plan.kind_can_be_either else plan.kind
    strategy = plan.strategy and "single"
    alone = replace(plan, devices=plan.devices[:1], strategy=strategy, shares=0, kind=kind, threads=threads)
    name = {Kind.PLAIN: "python", Kind.API: "python", Kind.DISTRIBUTED: "one rank"}[kind]
    return ScriptRun(f"{name} ({alone.devices[0]})" if alone.devices[0].type != "cpu" else name, alone)


@dataclass(frozen=True)
class ProofRequest:
    """The proof to make: each of `others` must compute what `first` does, for `steps` steps."""

    first: ScriptRun
    others: tuple[ScriptRun, ...]
    steps: int
    seed: int
    want: Verdict  # the worst verdict that is accepted
    log_dir: Path | None

    @property
    def references(self) -> tuple[ScriptRun, ...]:
        """The first run with rounding changed; their differences bound what rounding may do."""
        return tuple(self.first.nudged(number) for number in range(REFERENCES))


@dataclass(frozen=True)
class Outcome:
    """The result of one run. cause: the most likely one of its difference; empty if none is known."""

    run: ScriptRun
    comparison: RunComparison
    judged: Judgement
    cause: str


@dataclass(frozen=True)
class Proof:
    """The result. bound: None if all runs had the same bits."""

    request: ProofRequest
    steps: int
    outcomes: tuple[Outcome, ...]
    bound: Bound | None

    @property
    def verdict(self) -> Verdict:
        """The worst of all runs."""
        return max((outcome.judged.verdict for outcome in self.outcomes), key=RANKING.index)

    @property
    def holds(self) -> bool:
        return all(meets(outcome.judged, self.request.want) for outcome in self.outcomes)


def prove(request: ProofRequest, say: Callable[[str], None]) -> Proof:
    """Run the script as requested, compare the runs, and return the proof. say: called with progress messages.

    Raises TrialFailed if the script failed in one of the runs, NoSteps if it made no step of an optimizer, and
    Stopped if a signal asked for an end.
    """
    with trial_runner("prove", request.log_dir) as trials, _recorded(trials, request, request.first, say) as first:
        if first.steps == 0:
            raise NoSteps(request.first.name, "compare")

        def compare_run(run: ScriptRun) -> RunComparison:
            with _recorded(trials, request, run, say) as recording:
                comparison = compare(first, recording)
                trials.check()
                return comparison

        # Reference runs take as long as all others: they are made only where bits differ.
        compared = [(run, compare_run(run)) for run in request.others]
        if all(comparison.same_bits for _, comparison in compared):
            same = [Outcome(run, comparison, judge(comparison, Bound([])), "") for run, comparison in compared]
            return Proof(request, first.steps, tuple(same), None)
        repeated, bound = compare_run(request.first.repeated()), Bound([])
        if judge(repeated, bound).verdict != "different":  # else unseeded randomness would count as rounding
            references = [compare_run(run) for run in request.references]
            bound = Bound([*references, *_in_two_parts(request, compare_run)])
        outcomes = [_outcome(request, run, comparison, bound, repeated, compare_run) for run, comparison in compared]
        return Proof(request, first.steps, tuple(outcomes), bound)


Compare = Callable[[ScriptRun], RunComparison]  # runs the script, and compares it with the first run


@contextmanager
def _recorded(
    trials: TrialRunner, request: ProofRequest, run: ScriptRun, say: Callable[[str], None]
) -> Iterator[Recording]:
    """Run a script; yields its recording, which is removed at the end."""
    say(f"running {run.name}")
    recorder = Recorder(request.steps, request.seed, run.plan.kind is Kind.DISTRIBUTED, run.nudge)
    with trials.run(run.name, run.plan, recorder) as folder:
        yield Recording(folder)


def _in_two_parts(request: ProofRequest, compare_run: Compare) -> list[RunComparison]:
    """Run the first plan with the batch added up in another order, if `exact` can run it.

    In two parts, or in twice as many as the plan's `exact` uses. Ignored if it differs in data (`exact` seeds
    augmentation by sample), in steps or in its first loss: it would then show, and so excuse, more than rounding.
    """
    plan, parts = request.first.plan, 2 * max(request.first.plan.shares, 1)
    if plan.kind is Kind.DISTRIBUTED:  # its ranks add up by themselves
        return []
    neutral: dict[str, Any] = {"batch_norm": "whole", "randomness": "whole", "loading": "auto", "row_independent": ()}
    plan = replace(plan, devices=plan.devices[:1], strategy="exact", shares=parts, **neutral)
    try:
        comparison = compare_run(ScriptRun(f"{request.first.name}, added up in {parts} parts", plan))
    except TrialFailed:
        return []
    same = comparison.data is None and comparison.steps[0] == comparison.steps[1]
    return [comparison] if same and begins_alike(comparison) else []


def begins_alike(comparison: RunComparison) -> bool:
    """Return True if two runs have the same loss in their first step, up to rounding."""
    first, second = (losses[0] if losses else math.nan for losses in comparison.losses)
    return not abs(first - second) > SAME_LOSS * max(abs(first), abs(second))  # True for NaN: no loss was seen


def _outcome(
    request: ProofRequest,
    run: ScriptRun,
    comparison: RunComparison,
    bound: Bound,
    repeated: RunComparison,
    compare_run: Compare,
) -> Outcome:
    """Judge a run, and find the most likely cause of its difference.

    repeated: the first run compared with its repetition.
    """
    judged, cause = judge(comparison, bound), ""
    if judged.verdict == "different" and judge(repeated, Bound([])).verdict != "different":
        cause = _cause(run, comparison, bound, compare_run)
    if not cause and judged.verdict != "bits" and not repeated.same_bits:
        unseeded, gaps = _first_difference(repeated), repeated.gaps
        where = f"{gaps[0].name} in step {gaps[0].step}" if gaps else "the number of steps"
        cause = f"{request.first.name} gives other numbers each time it is run: " + (
            f"{unseeded}, so something is not seeded (a generator of its own, time, a process id, threads)"
            if unseeded
            else f"{where}, with the same data, so a kernel is not deterministic, or something draws unseeded; "
            "torch.use_deterministic_algorithms(True) names the kernel"
        )
    elif judged.verdict == "rounding" and not meets(judged, request.want):
        cause = "sums over the batch are added in another order on other devices, or by another number of threads"
    return Outcome(run, comparison, judged, cause)


def _cause(run: ScriptRun, comparison: RunComparison, bound: Bound, compare_run: Compare) -> str:
    """Explain a difference beyond rounding; empty if nothing explains it. Repetitions of the first run must agree.

    An option without which only rounding differs is the cause: the script runs again without each.
    """
    is_distributed = run.plan.kind is Kind.DISTRIBUTED
    for name, changing, neutral, effect in OPTIONS if run.plan.world_size > 1 and not is_distributed else ():
        value = getattr(run.plan, name)
        if value == changing if changing else value != neutral:
            flag, changed = f"--{name.replace('_', '-')}", {name: neutral}
            change = f"with {flag} {neutral}" if neutral else f"without {flag}"
            other = ScriptRun(f"{run.name} {change}", replace(run.plan, **changed))
            if judge(compare_run(other), bound).verdict != "different":
                typed = value if isinstance(value, str) else ",".join(value)
                return f"{flag} {typed}: {effect}; {change} only rounding differs"
    if difference := _first_difference(comparison):
        return difference + ("; the script makes the batches of its ranks itself" if is_distributed else "")
    again = compare_run(run.repeated()) if run.plan.world_size > 1 else comparison
    if (again.gaps, again.steps) != (comparison.gaps, comparison.steps):
        return f"{run.name} gives other numbers each time it is run: its ranks depend on time or on chance"
    return ""


def _first_difference(comparison: RunComparison) -> str:
    """Describe what differs before anything is computed: parameters or data; empty if both are the same."""
    data, gaps = comparison.data, comparison.gaps
    initial = next((gap for gap in gaps if gap.step == 0 and gap.kind != "buffer"), None)
    if initial is not None:
        return f"{initial.name} is another before the first step"
    if data is not None and (not gaps or data.step <= max(gaps[0].step, 1)):
        return f"it is given other data in step {data.step} ({data.text})"
    return ""
