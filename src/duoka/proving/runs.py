"""A run of the script to record, and the recording of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from duoka.plan import Kind, Plan
from duoka.proving.recorder import RecordingObserver
from duoka.proving.recording import Recording
from duoka.trials.observer import TrialFolders
from duoka.trials.runner import TrialFailed, TrialRunner


@dataclass(frozen=True)
class ScriptRun:
    """A run to record.

    name: shown in the table. nudge: None, or the seed of the directions in which weights are moved.
    """

    name: str
    plan: Plan
    nudge: int | None = None

    def nudged(self, seed: int) -> ScriptRun:
        """Return the same run with weights moved in their last place."""
        return ScriptRun(f"{self.name}, nudged ({seed + 1})", self.plan, seed)

    def in_two_parts(self) -> ScriptRun:
        """Return the same run on one device, with the batch added up in another order.

        In two parts, or in twice as many as the plan's `exact` uses.
        """
        plan, parts = self.plan, 2 * max(self.plan.shares, 1)
        if plan.kind is Kind.DISTRIBUTED:
            raise TrialFailed(self.name, "its ranks add up by themselves", "")
        numbers: dict[str, Any] = {"batch_norm": "whole", "randomness": "whole", "loading": "auto"}
        numbers |= {"row_independent": ()}
        plan = replace(plan, devices=plan.devices[:1], strategy="exact", shares=parts, **numbers)
        return ScriptRun(f"{self.name}, added up in {parts} parts", plan)

    def repeated(self) -> ScriptRun:
        """Return the same run under another name."""
        return replace(self, name=f"{self.name}, once more")


def as_python(plan: Plan, threads: int | None) -> ScriptRun:
    """Return the run on the plan's first device: as `python` runs it, or as one rank if the script needs ranks."""
    kind = Kind.PLAIN if plan.kind_can_be_either else plan.kind
    strategy = plan.strategy and "single"
    alone = replace(plan, devices=plan.devices[:1], strategy=strategy, shares=0, kind=kind, threads=threads)
    name = {Kind.PLAIN: "python", Kind.API: "python", Kind.DISTRIBUTED: "one rank"}[kind]
    return ScriptRun(f"{name} ({alone.devices[0]})" if alone.devices[0].type != "cpu" else name, alone)


@dataclass(frozen=True)
class RunRecorder:
    """Records runs, one after the other. steps: of each. seed: of all generators."""

    trials: TrialRunner
    steps: int
    seed: int

    @contextmanager
    def record(self, run: ScriptRun) -> Iterator[Recording]:
        """Run a script; yields its recording, which is removed at the end.

        Raises:
            TrialFailed: the script failed before it had made all steps.
            Stopped: a signal asked for an end.
        """

        def recorder(folders: TrialFolders) -> RecordingObserver:
            own_rows = run.plan.kind is Kind.DISTRIBUTED
            return RecordingObserver(folders, self.steps, self.seed, own_rows, run.nudge)

        with self.trials.run(run.name, run.plan, recorder) as seen:
            yield Recording(seen)
