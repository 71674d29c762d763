"""All runs of a forecast, one after the other, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.errors import DuokaError
from duoka.forecasting.timer import Timer
from duoka.forecasting.timing import LEAST, Timing, read
from duoka.plan import Plan
from duoka.trials.accompany import Places
from duoka.trials.stage import NoSteps, Stage, stage

SEED = 0  # every run begins with it, so that all do the same
BEYOND = 1.25  # times the ideal: more than caches can explain
ALIKE = 1.05  # times as fast: what is nearer is not called faster


class TooFewSteps(DuokaError):
    """A script that ends after so few steps tells nothing of how long one takes."""

    def __init__(self, name: str, steps: int, counted: int) -> None:
        super().__init__(
            f"{name}: the script ended after {steps} step{'s' * (steps > 1)}, too few to tell how long one takes: "
            f"the first do not count, and {counted} are left where {LEAST} are needed; give it more data or epochs"
        )


@dataclass(frozen=True)
class Asked:
    """What is to be run: the plan of each side, by its name, the one of one device first.

    target: the script, or the module. steps: of each side.
    cores: how many the machine has for this process. log_dir: where what the script prints is kept, or None.
    """

    target: str
    plans: Sequence[tuple[str, Plan]]
    steps: int
    cores: int
    log_dir: Path | None


@dataclass(frozen=True)
class Side:
    """What came of one number of devices."""

    name: str
    plan: Plan
    timing: Timing

    @property
    def devices(self) -> int:
        """How many."""
        return len(self.plan.devices)

    @property
    def waited(self) -> float | None:
        """Seconds of a step; None where the processor does not wait itself, but has the device wait."""
        return self.timing.waited if self.plan.devices[0].type == "cpu" else None

    @property
    def samples_per_second(self) -> float | None:
        """None where the samples of a step cannot be counted."""
        samples = self.timing.samples
        return None if samples is None else samples / self.timing.step


@dataclass(frozen=True)
class Forecast:
    """What was found. sides: by the number of devices, one first."""

    asked: Asked
    sides: tuple[Side, ...]

    @property
    def one(self) -> Side:
        """One device."""
        return self.sides[0]

    @property
    def best(self) -> Side:
        """The fastest; of those that are about as fast, the one with the fewest devices."""
        least = min(side.timing.step for side in self.sides)
        return next(side for side in self.sides if side.timing.step <= ALIKE * least)

    @property
    def is_possible(self) -> bool:
        """Whether the best is about as fast as it can be at most, so that one device was not slowed down."""
        return self.part(self.best) <= BEYOND

    def times(self, side: Side) -> float:
        """How many times as fast as one device."""
        return self.one.timing.step / side.timing.step

    def part(self, side: Side) -> float:
        """The part of the ideal, which is as many times as fast as there are devices."""
        return self.times(side) / side.devices


def forecast(asked: Asked, say: Callable[[str], None]) -> Forecast:
    """Run all sides. say: told what is going on.

    Raises:
        TrialFailed: the script failed on one of the sides.
        NoSteps: it made no step that could be seen.
        TooFewSteps: it made so few that none would count.
        Stopped: a signal asked for an end. Nothing is left behind.
    """
    sides = []
    with stage("forecast", asked.log_dir) as here:
        for name, plan in asked.plans:
            say(f"running {name}")
            sides.append(Side(name, plan, _timed(here, name, plan, asked.steps)))
    return Forecast(asked, tuple(sides))


def _timed(here: Stage, name: str, plan: Plan, steps: int) -> Timing:
    def timer(places: Places) -> Timer:
        return Timer(places, steps, SEED, False, plan.devices[0].type)

    with here.played(name, plan, timer) as seen:
        timing = read(seen)
    if timing.steps == 0:
        raise NoSteps(name, "time")
    if timing.counted < LEAST:
        raise TooFewSteps(name, timing.steps, timing.counted)
    return timing
