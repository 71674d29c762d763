"""Run a script on each number of devices, one after the other, compare their times, and explain slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka.errors import DuokaError
from duoka.forecasting.timer import LEAST, Timer, Timing, read
from duoka.planning.plan import Plan
from duoka.strategies.balancing import MEASURED
from duoka.system.messages import in_words
from duoka.trials.runner import NoSteps, TrialRunner, trial_runner
from duoka.watching.watcher import UNEVEN, WORTH_A_WORD

SEED = 0  # of every run, so that all compute the same
BEYOND = 1.25  # times the ideal speed: more than caches can explain
ALIKE = 1.05  # times as fast: numbers of devices within this factor count as equally fast


@dataclass(frozen=True)
class ForecastRequest:
    """The plans to run, by name; the one of one device is first.

    target: the script, or the module. steps: of each run. cores: available to this process. log_dir: where to keep
    the script's output, or None.
    """

    target: str
    plans: Sequence[tuple[str, Plan]]
    steps: int
    cores: int
    log_dir: Path | None


@dataclass(frozen=True)
class TimedRun:
    """The measured run on one number of devices."""

    name: str
    plan: Plan
    timing: Timing

    @property
    def devices(self) -> int:
        return len(self.plan.devices)

    @property
    def ideal(self) -> float:
        """The ideal speedup: the number of devices, each counted as its weight tells if there are weights."""
        weights = self.plan.weights
        return sum(weights) / max(weights) if weights else self.devices

    @property
    def waited(self) -> float | None:
        """Seconds of a step spent waiting in collectives; None on devices that wait asynchronously (GPUs)."""
        return self.timing.waited if self.plan.devices[0].type == "cpu" else None

    @property
    def samples_per_second(self) -> float | None:
        """None if the samples of a step cannot be counted."""
        samples = self.timing.samples
        return None if samples is None else samples / self.timing.step


@dataclass(frozen=True)
class Forecast:
    """The result. runs: by the number of devices, one first."""

    request: ForecastRequest
    runs: tuple[TimedRun, ...]

    @property
    def by_devices(self) -> tuple[TimedRun, ...]:
        """The last run on each number of devices."""
        return tuple({run.devices: run for run in self.runs}.values())

    @property
    def baseline(self) -> TimedRun:
        return self.runs[0]

    @property
    def best(self) -> TimedRun:
        """The fastest run; of those within `ALIKE`, the one with the fewest devices."""
        least = min(run.timing.step for run in self.runs)
        return next(run for run in self.runs if run.timing.step <= ALIKE * least)

    @property
    def is_possible(self) -> bool:
        """False if the best run is faster than the ideal allows: then the run on one device was slowed down."""
        return self.efficiency(self.best) <= BEYOND

    def speedup(self, run: TimedRun) -> float:
        return self.baseline.timing.step / run.timing.step

    def efficiency(self, run: TimedRun) -> float:
        """Return the speedup divided by the ideal one."""
        return self.speedup(run) / run.ideal


def forecast(request: ForecastRequest, say: Callable[[str], None]) -> Forecast:
    """Measure every plan. say: called with progress messages.

    Raises:
        TrialFailed: the script failed in one of the runs.
        NoSteps: it made no optimizer step.
        DuokaError: it made too few steps to measure.
        Stopped: a signal asked for an end; all files are removed.
    """
    runs = []
    with trial_runner("forecast", request.log_dir) as trials:
        for name, plan in request.plans:
            say(f"running {name}")
            runs.append(TimedRun(name, plan, _timed(trials, name, plan, request.steps)))
    return Forecast(request, tuple(runs))


def _timed(trials: TrialRunner, name: str, plan: Plan, steps: int) -> Timing:
    settling = MEASURED if plan.measures_rows else 0
    with trials.run(name, plan, Timer(steps + settling, SEED, plan.devices[0].type, settling)) as folder:
        timing = read(folder, settling)
    if timing.steps == 0:
        raise NoSteps(name, "time")
    if timing.counted < LEAST:
        raise DuokaError(
            f"{name}: the script ended after {timing.steps} step{'s' * (timing.steps > 1)}, too few to tell how long "
            f"one takes: the first do not count, and {timing.counted} are left where {LEAST} are needed; give it "
            "more data or epochs"
        )
    return timing


GOOD = 0.7  # of the ideal; slower runs are explained


def is_below_ideal(forecast: Forecast, run: TimedRun) -> bool:
    """Return True if this run is far below the ideal, or slower than one with fewer devices."""
    return run.devices > 1 and (run.devices > forecast.best.devices or forecast.efficiency(run) < GOOD)


def reasons(forecast: Forecast, run: TimedRun) -> list[str]:
    """Return sentences for the user, the largest cost first.

    Empty if no time is lost, or if no measured cost explains it.
    """
    lost = run.timing.step - forecast.baseline.timing.step / run.devices
    if lost <= 0:
        return []
    measured = sorted(_measured(run), reverse=True)
    texts = [text for seconds, text in measured if seconds >= WORTH_A_WORD * lost]
    return [*_known(forecast, run), *texts, *_rest(run, lost)]


def _measured(run: TimedRun) -> Iterator[tuple[float, str]]:
    timing, step = run.timing, in_words(run.timing.step)
    if run.waited:
        waiting = f"{in_words(run.waited)} of its {step} are waiting for other ranks"
        yield run.waited, f"{waiting}: {UNEVEN}"
    if timing.repeated:
        repeated = f"{in_words(timing.repeated)} of its {step} go into operations that every rank computes whole"
        yield timing.repeated, f"{repeated}, most of it {timing.costliest}"


def _known(forecast: Forecast, run: TimedRun) -> Iterator[str]:
    samples, devices = run.timing.samples, run.devices
    if samples is not None and samples < devices:
        yield f"a batch of {samples} over {devices} devices is computed whole by each of them"
    if run.plan.devices[0].type == "cpu":
        cores = forecast.request.cores
        together, alone = min(devices * run.timing.threads, cores), min(forecast.baseline.timing.threads, cores)
        if together < devices * alone:
            yield f"one worker by itself computes on {_cores(alone)} already, and {devices} have {together} together"


def _rest(run: TimedRun, lost: float) -> Iterator[str]:
    """Yield a sentence about the part of `lost` that no measurement explains, if it is large enough to mention.

    lost: seconds by which a step exceeds one device's step divided by the number of devices.
    """
    if run.waited is None:
        return
    rest = lost - run.waited - run.timing.repeated
    if rest >= WORTH_A_WORD * lost:
        yield (
            f"{in_words(rest)} more than its share of one device's step is work that each rank repeats: the "
            "script's own lines, the optimizer's step, and the cost of sharding"
        )


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number > 1)}"
