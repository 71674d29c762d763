"""Format a forecast: a table and sentences for the user, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from duoka.forecasting.forecast import ALIKE, Forecast, TimedRun
from duoka.forecasting.reasons import is_below_ideal, reasons
from duoka.system.messages import in_words
from duoka.trials.runner import render_table

UNSTEADY = 0.5  # of a step; if the middle half is wider, the median is unreliable
AGAIN = "measure again, with more --steps, when nothing else uses the machine"


def as_text(forecast: Forecast, verbosity: str) -> str:
    """Format the whole result; with `quiet`, only the verdict."""
    last = f"verdict: {verdict(forecast)}"
    if verbosity == "quiet":
        return last
    notes = [f"note: {note}" for note in doubts(forecast)]
    return "\n".join([render_table(_table(forecast)), *sentences(forecast, verbosity == "verbose"), *notes, last])


def _table(forecast: Forecast) -> Table:
    table = Table(title=title(forecast), title_justify="left")
    for name in columns(forecast):
        table.add_column(name, justify="left" if name == "devices" else "right")
    for run in forecast.runs:
        table.add_row(*cells(forecast, run))
    return table


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
    return f"measured on {_range(made)} steps of {forecast.request.target}, of which {_range(counted)} count"


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
    """Compare a run with one device, and with the best."""
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
    one, best = forecast.baseline, forecast.best
    if best is one:
        return f"{one.name} is the fastest here; more devices do not make this script faster"
    times = f"{forecast.speedup(best):.2f} times as fast as {one.name}"
    if not forecast.is_possible:
        return (
            f"none to be trusted: {best.name} was {times}, more than the ideal, so something has slowed {one.name} "
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
    one, best = forecast.baseline, forecast.best
    if best is not one and best.timing.middle[1] > one.timing.middle[0]:
        yield f"the times of a step on {best.name} and on {one.name} overlap; {AGAIN}"


def as_data(forecast: Forecast) -> str:
    """Return the forecast as JSON; times are seconds per step."""
    best = forecast.best
    data = {
        "target": forecast.request.target,
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
        "whole": timing.whole,
        "costliest": timing.costliest or None,
        "threads": timing.threads,
        "reasons": reasons(forecast, run) if is_below_ideal(forecast, run) else [],
    }
