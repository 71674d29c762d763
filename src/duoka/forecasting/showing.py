"""Format a forecast: a table and sentences for the user, JSON, or a page of HTML with charts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from duoka.forecasting.forecast import ALIKE, Forecast, TimedRun, is_below_ideal, reasons
from duoka.system.messages import in_words
from duoka.trials.runner import render_table
from duoka.watching.history import Point
from duoka.watching.html import Axis, Line, area_chart, document, head, line_chart, listed, table

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
        "whole": timing.repeated,
        "costliest": timing.costliest or None,
        "threads": timing.threads,
        "reasons": reasons(forecast, run) if is_below_ideal(forecast, run) else [],
    }


def page(forecast: Forecast) -> str:
    """Return the page: the verdict, the time of a step and its ideal against devices, their parts, and the table."""
    body = [
        head(f"{forecast.request.target}: {verdict(forecast)}", [title(forecast)]),
        listed("What stands out", map(str.strip, [*sentences(forecast, False), *doubts(forecast)])),
        *_charts(forecast),
        table("Each number of devices", columns(forecast), [cells(forecast, run) for run in forecast.runs]),
    ]
    return document(f"{forecast.request.target}: forecast", body)


def _charts(forecast: Forecast) -> Iterator[str]:
    alone = forecast.baseline.timing.step
    top = max(run.timing.middle[1] for run in forecast.by_devices)
    lines = [
        _line(forecast, "measured", "c5", lambda run: run.timing.step),
        _line(forecast, "ideal: that of one device, divided by their number", "c0", lambda run: alone / run.devices),
        _line(forecast, "the fastest quarter is below", "c1", lambda run: run.timing.middle[0]),
        _line(forecast, "the slowest quarter is above", "c2", lambda run: run.timing.middle[1]),
    ]
    yield line_chart("Seconds of a step, against devices", _axis(forecast, top), lines)
    rates = [run.samples_per_second for run in forecast.by_devices]
    known = [rate for rate in rates if rate is not None]
    if len(known) == len(rates):
        most = max([*known, known[0] * forecast.by_devices[-1].devices])
        axis = _axis(forecast, most, f"{most:,.4g}")
        ideal = _line(forecast, "ideal", "c0", lambda run: known[0] * run.devices)
        measured = _line(forecast, "measured", "c5", lambda run: run.samples_per_second or 0)
        yield line_chart("Samples a second", axis, [measured, ideal])
    layers = [
        _line(forecast, "each rank by itself", "c1", lambda run: run.timing.step - _lost(run)),
        _line(forecast, "what every rank computes whole", "c4", lambda run: run.timing.repeated),
        _line(forecast, "waiting for other ranks", "c3", lambda run: run.waited or 0.0),
    ]
    yield area_chart("Parts of a step", _axis(forecast, max(run.timing.step for run in forecast.by_devices)), layers)


def _lost(run: TimedRun) -> float:
    return min(run.timing.step, run.timing.repeated + (run.waited or 0.0))


def _line(forecast: Forecast, name: str, style: str, value: Callable[[TimedRun], float]) -> Line:
    return Line(name, style, [[Point(math.log2(run.devices), value(run)) for run in forecast.by_devices]])


def _axis(forecast: Forecast, top: float, high: str = "") -> Axis:
    """Return axes on which each doubling of devices is as wide as the others."""
    ticks = [(math.log2(run.devices), run.name) for run in forecast.by_devices]
    return Axis(ticks[0][0], ticks[-1][0], top, high or in_words(top), ticks=ticks)
