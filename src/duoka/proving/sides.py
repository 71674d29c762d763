"""One run of the script as it is to be recorded, with what is asked for, up to the last step that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from duoka.plan import Kind, Plan
from duoka.proving.recorder import Recorder
from duoka.proving.recording import Recording
from duoka.trials.accompany import Places
from duoka.trials.stage import Stage, TrialFailed


@dataclass(frozen=True)
class Side:
    """What is run. name: what it is called in the table. nudge: None, or by which seed weights are moved."""

    name: str
    plan: Plan
    nudge: int | None = None

    def nudged(self, seed: int) -> Side:
        """The same, with weights moved in their last place."""
        return Side(f"{self.name}, nudged ({seed + 1})", self.plan, seed)

    def in_two_parts(self) -> Side:
        """The same on one device, with sums over the batch added up in two parts, or in twice as many."""
        plan, parts = self.plan, 2 * max(self.plan.shares, 1)
        if plan.kind is Kind.DISTRIBUTED:
            raise TrialFailed(self.name, "its ranks add up by themselves", "")
        numbers: dict[str, Any] = {"batch_norm": "whole", "randomness": "whole", "loading": "auto"}
        plan = replace(plan, devices=plan.devices[:1], strategy="exact", shares=parts, **numbers)
        return Side(f"{self.name}, added up in {parts} parts", plan)

    def again(self) -> Side:
        """The very same."""
        return replace(self, name=f"{self.name}, once more")


def as_python(plan: Plan, threads: int | None) -> Side:
    """The script of a plan on the first of its devices, as `python` runs it; where it needs ranks, as one of one."""
    kind = Kind.PLAIN if plan.kind_can_be_either else plan.kind
    strategy = plan.strategy and "single"
    alone = replace(plan, devices=plan.devices[:1], strategy=strategy, shares=0, kind=kind, threads=threads)
    name = {Kind.PLAIN: "python", Kind.API: "python", Kind.DISTRIBUTED: "one rank"}[kind]
    return Side(f"{name} ({alone.devices[0]})" if alone.devices[0].type != "cpu" else name, alone)


@dataclass(frozen=True)
class Studio:
    """Where sides are recorded, one after the other. steps: of each. seed: with which all begin."""

    stage: Stage
    steps: int
    seed: int

    @contextmanager
    def recorded(self, side: Side) -> Iterator[Recording]:
        """Run a side; its recording, which is removed at the end.

        Raises:
            TrialFailed: the script ended badly before it had made all steps.
            Stopped: somebody asked for an end.
        """

        def recorder(places: Places) -> Recorder:
            own_rows = side.plan.kind is Kind.DISTRIBUTED
            return Recorder(places, self.steps, self.seed, own_rows, side.nudge)

        with self.stage.played(side.name, side.plan, recorder) as seen:
            yield Recording(seen)
