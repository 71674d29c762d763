"""Run a script on each number of devices, one after the other, compare their times, and explain slow ones.

Then print a table and sentences, JSON, or a page of HTML with charts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.errors import DuokaError
from duoka.forecasting.timer import LEAST, Timer, Timing, read
from duoka.planning.plan import Plan
from duoka.strategies.balancing import MEASURED
from duoka.system.messages import in_words
from duoka.trials.runner import NoSteps, TrialRunner, render_table, trial_runner
from duoka.watching.history import Point
from duoka.watching.html import Axis, Line, area_chart, document, head, line_chart, listed, table
from duoka.watching.watcher import UNEVEN, WORTH_A_WORD

SEED = 0  # of every run, so that all compute the same
BEYOND = 1.25  # times the ideal speed: more than caches can explain
ALIKE = 1.05  # times as fast: numbers of devices within this factor count as equally fast


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
    """The result."""

    target: str  # the script, or the module
    cores: int  # available to this process
    runs: tuple[TimedRun, ...]  # by the number of devices, one first

    @property
    def by_devices(self) -> tuple[TimedRun, ...]:
        """The last run on each number of devices."""
        return tuple({run.devices: run for run in self.runs}.values())  # uneven shares are measured after even ones

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


def forecast(
    target: str,
    plans: Iterable[tuple[str, Plan]],
    steps: int,
    cores: int,
    log_dir: Path | None,
    say: Callable[[str], None],
) -> Forecast:
    """Measure every plan, given by name, for so many steps; the one of one device is first.

    log_dir: where to keep the script's output. say: called with progress messages. Raises TrialFailed if the script
    failed, NoSteps if it made no step of an optimizer, DuokaError if it made too few to measure, and Stopped if a
    signal asked for an end.
    """
    runs = []
    with trial_runner("forecast", log_dir) as trials:
        for name, plan in plans:
            say(f"running {name}")
            runs.append(TimedRun(name, plan, _timed(trials, name, plan, steps)))
    return Forecast(target, cores, tuple(runs))


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
    timing, step, devices = run.timing, in_words(run.timing.step), run.devices
    lost = timing.step - forecast.baseline.timing.step / devices
    if lost <= 0:
        return []
    known = []
    if timing.samples is not None and timing.samples < devices:
        known.append(f"a batch of {timing.samples} over {devices} devices is computed whole by each of them")
    if run.plan.devices[0].type == "cpu":
        cores = forecast.cores
        together, alone = min(devices * timing.threads, cores), min(forecast.baseline.timing.threads, cores)
        if together < devices * alone:
            known.append(
                f"one worker by itself computes on {_cores(alone)} already, and {devices} have {together} together"
            )
    repeated = f"{in_words(timing.repeated)} of its {step} go into operations that every rank computes whole"
    measured = [(timing.repeated, f"{repeated}, most of it {timing.costliest}")]
    if run.waited:
        text = f"{in_words(run.waited)} of its {step} are waiting for other ranks: {UNEVEN}"
        measured.append((run.waited, text))
    texts = [text for seconds, text in sorted(measured, reverse=True) if seconds >= WORTH_A_WORD * lost]
    unexplained = 0.0 if run.waited is None else lost - run.waited - timing.repeated
    if unexplained >= WORTH_A_WORD * lost:
        texts.append(
            f"{in_words(unexplained)} more than its share of one device's step is work that each rank repeats: the "
            "script's own lines, the optimizer's step, and the cost of sharding"
        )
    return [*known, *texts]


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number > 1)}"


# The result as text, as JSON and as a page.

UNSTEADY = 0.5  # of a step; if the middle half is wider, the median is unreliable
AGAIN = "measure again, with more --steps, when nothing else uses the machine"


def as_text(forecast: Forecast, verbosity: str) -> str:
    """Format the whole result; with `quiet`, only the verdict."""
    last = f"verdict: {verdict(forecast)}"
    if verbosity == "quiet":
        return last
    notes = [f"note: {note}" for note in doubts(forecast)]
    names = columns(forecast)
    table = render_table(title(forecast), names, [cells(forecast, run) for run in forecast.runs], names[1:])
    return "\n".join([table, *sentences(forecast, verbosity == "verbose"), *notes, last])


def columns(forecast: Forecast) -> list[str]:
    """Return the names of the table's columns."""
    samples = ["samples a second"] * _knows_samples(forecast)
    return ["devices", "a step", "the middle half", *samples, "times as fast", "of the ideal", "waiting"]


def cells(forecast: Forecast, run: TimedRun) -> list[str]:
    """Return a row of the table."""
    low, high = run.timing.middle
    rate, waited = run.samples_per_second, run.waited
    return [
        run.name,
        in_words(run.timing.step),
        f"{in_words(low)} to {in_words(high)}",
        *[f"{rate:,.0f}" if rate is not None else ""] * _knows_samples(forecast),
        f"{forecast.speedup(run):.2f}",
        f"{forecast.efficiency(run):.0%}",
        "" if run.devices == 1 else "not seen" if waited is None else in_words(waited),
    ]


def _knows_samples(forecast: Forecast) -> bool:
    return any(run.samples_per_second is not None for run in forecast.runs)


def title(forecast: Forecast) -> str:
    """Describe what was measured."""
    made, counted = ({getattr(run.timing, name) for run in forecast.runs} for name in ("steps", "counted"))
    return f"measured on {_range(made)} steps of {forecast.target}, of which {_range(counted)} count"


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def sentences(forecast: Forecast, all_of_them: bool) -> Iterator[str]:
    """Yield why more devices are not faster. all_of_them: also for those near the ideal."""
    for run in forecast.runs:
        if is_below_ideal(forecast, run) or (all_of_them and run.devices > 1):
            why = reasons(forecast, run) or ["no measured cost explains it"]
            yield f"{run.name}: {_how_fast(forecast, run)}"
            yield from (f"  {reason}" for reason in why)


def _how_fast(forecast: Forecast, run: TimedRun) -> str:
    times, best = forecast.speedup(run), forecast.best
    if times * ALIKE < 1:
        return f"slower than {forecast.baseline.name}, {1 / times:.2f} times its time"
    if run.devices > best.devices and best.devices > 1:
        return f"no faster than {best.name}"
    if times < ALIKE:
        return f"about as fast as {forecast.baseline.name}"
    return f"faster than {forecast.baseline.name}, but {forecast.efficiency(run):.0%} of the ideal"


def verdict(forecast: Forecast) -> str:
    """Name the fastest number of devices, or say that the measurement cannot be trusted."""
    alone, best = forecast.baseline, forecast.best
    if best is alone:
        return f"{alone.name} is the fastest here; more devices do not make this script faster"
    times = f"{forecast.speedup(best):.2f} times as fast as {alone.name}"
    if not forecast.is_possible:
        return (
            f"none to be trusted: {best.name} was {times}, more than the ideal, so something has slowed {alone.name} "
            f"down; {AGAIN}"
        )
    return f"{best.name} is the fastest here, {times}, {forecast.efficiency(best):.0%} of the ideal"


def doubts(forecast: Forecast) -> Iterator[str]:
    """Yield reasons for which the verdict is uncertain."""
    for run in forecast.runs:
        low, high = run.timing.middle
        if high - low > UNSTEADY * run.timing.step:
            middle = f"the middle half is {in_words(low)} to {in_words(high)}"
            yield f"the steps of {run.name} are not alike ({middle}), or the machine is busy; {AGAIN}"
    alone, best = forecast.baseline, forecast.best
    if best is not alone and best.timing.middle[1] > alone.timing.middle[0]:
        yield f"the times of a step on {best.name} and on {alone.name} overlap; {AGAIN}"


def as_data(forecast: Forecast) -> str:
    """Return the forecast as JSON; times are seconds per step."""
    best = forecast.best
    data = {
        "target": forecast.target,
        "fastest": {"name": best.name, "devices": best.devices} if forecast.is_possible else None,
        "verdict": verdict(forecast),
        "notes": list(doubts(forecast)),
        "sides": [_run_data(forecast, run) for run in forecast.runs],
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)


def _run_data(forecast: Forecast, run: TimedRun) -> dict[str, Any]:
    timing = run.timing
    return {
        "name": run.name,
        "devices": [str(device) for device in run.plan.devices],
        "steps": timing.steps,
        "counted": timing.counted,
        "step": timing.step,
        "middle_half": list(timing.middle),
        "samples": timing.samples,
        "samples_per_second": run.samples_per_second,
        "times_as_fast": forecast.speedup(run),
        "of_the_ideal": forecast.efficiency(run),
        "waiting": run.waited,
        "whole": timing.repeated,
        "costliest": timing.costliest or None,
        "threads": timing.threads,
        "reasons": reasons(forecast, run) if is_below_ideal(forecast, run) else [],
    }


def page(forecast: Forecast) -> str:
    """Return the page: the verdict, the time of a step and its ideal against devices, their parts, and the table."""
    body = [
        head(f"{forecast.target}: {verdict(forecast)}", [title(forecast)]),
        listed("What stands out", map(str.strip, [*sentences(forecast, False), *doubts(forecast)])),
        *_charts(forecast),
        table("Each number of devices", columns(forecast), [cells(forecast, run) for run in forecast.runs]),
    ]
    return document(f"{forecast.target}: forecast", body)


def _charts(forecast: Forecast) -> Iterator[str]:
    runs, alone = forecast.by_devices, forecast.baseline.timing.step
    ticks = [(math.log2(run.devices), run.name) for run in runs]  # each doubling is as wide as the others

    def axis(top: float, high: str = "") -> Axis:
        return Axis(ticks[0][0], ticks[-1][0], top, high or in_words(top), ticks=ticks)

    def line(name: str, style: str, value: Callable[[TimedRun], float]) -> Line:
        return Line(name, style, [[Point(math.log2(run.devices), value(run)) for run in runs]])

    def by_itself(run: TimedRun) -> float:
        return max(0.0, run.timing.step - run.timing.repeated - (run.waited or 0.0))

    lines = [
        line("measured", "c5", lambda run: run.timing.step),
        line("ideal: that of one device, divided by their number", "c0", lambda run: alone / run.devices),
        line("the fastest quarter is below", "c1", lambda run: run.timing.middle[0]),
        line("the slowest quarter is above", "c2", lambda run: run.timing.middle[1]),
    ]
    yield line_chart("Seconds of a step, against devices", axis(max(run.timing.middle[1] for run in runs)), lines)
    known = [rate for run in runs if (rate := run.samples_per_second) is not None]
    if len(known) == len(runs):
        most = max([*known, known[0] * runs[-1].devices])
        lines = [
            line("measured", "c5", lambda run: run.samples_per_second or 0),
            line("ideal", "c0", lambda run: known[0] * run.devices),
        ]
        yield line_chart("Samples a second", axis(most, f"{most:,.4g}"), lines)
    layers = [
        line("each rank by itself", "c1", by_itself),
        line("what every rank computes whole", "c4", lambda run: run.timing.repeated),
        line("waiting for other ranks", "c3", lambda run: run.waited or 0.0),
    ]
    yield area_chart("Parts of a step", axis(max(run.timing.step for run in runs)), layers)
