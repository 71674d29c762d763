"""What a forecast found: a table and sentences for a person, or data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from duoka.forecasting.forecast import ALIKE, Forecast, Side
from duoka.forecasting.reasons import in_words, is_short, reasons
from duoka.trials.drawn import drawn

UNSTEADY = 0.5  # of a step: where the middle half is wider, the median says little
AGAIN = "measure again, with more --steps, when nothing else uses the machine"


def as_text(forecast: Forecast, verbosity: str) -> str:
    """All that is to be said, or with `quiet` the last line alone."""
    last = f"verdict: {verdict(forecast)}"
    if verbosity == "quiet":
        return last
    sentences = _sentences(forecast, verbosity == "verbose")
    notes = [f"note: {note}" for note in doubts(forecast)]
    return "\n".join([drawn(_table(forecast)), *sentences, *notes, last])


def _table(forecast: Forecast) -> Table:
    sides = forecast.sides
    knows_samples = any(side.samples_per_second is not None for side in sides)
    table = Table(title=_title(forecast), title_justify="left")
    for name in ("devices", "a step", "the middle half", *["samples a second"] * knows_samples):
        table.add_column(name, justify="left" if name == "devices" else "right")
    for name in ("times as fast", "of the ideal", "waiting"):
        table.add_column(name, justify="right")
    for side in sides:
        low, high = side.timing.middle
        rate, waited = side.samples_per_second, side.waited
        table.add_row(
            side.name,
            in_words(side.timing.step),
            f"{in_words(low)} to {in_words(high)}",
            *[f"{rate:,.0f}" if rate is not None else ""] * knows_samples,
            f"{forecast.times(side):.2f}",
            f"{forecast.part(side):.0%}",
            "" if side.devices == 1 else "not seen" if waited is None else in_words(waited),
        )
    return table


def _title(forecast: Forecast) -> str:
    made, counted = ({getattr(side.timing, name) for side in forecast.sides} for name in ("steps", "counted"))
    return f"measured on {_range(made)} steps of {forecast.asked.target}, of which {_range(counted)} count"


def _range(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _sentences(forecast: Forecast, all_of_them: bool) -> Iterator[str]:
    for side in forecast.sides:
        if is_short(forecast, side) or (all_of_them and side.devices > 1):
            why = reasons(forecast, side) or ["nothing that was measured tells why"]
            yield f"{side.name}: {_how_fast(forecast, side)}"
            yield from (f"  {reason}" for reason in why)


def _how_fast(forecast: Forecast, side: Side) -> str:
    """A number of devices against one, and against the best."""
    times, best = forecast.times(side), forecast.best
    if times * ALIKE < 1:
        return f"slower than {forecast.one.name}, {1 / times:.2f} times its time"
    if side.devices > best.devices and best.devices > 1:
        return f"no faster than {best.name}"
    if times < ALIKE:
        return f"about as fast as {forecast.one.name}"
    return f"faster than {forecast.one.name}, but {forecast.part(side):.0%} of the ideal"


def verdict(forecast: Forecast) -> str:
    """Which number of devices is the fastest here, unless it cannot be."""
    one, best = forecast.one, forecast.best
    if best is one:
        return f"{one.name} is the fastest here; more devices do not make this script faster"
    times = f"{forecast.times(best):.2f} times as fast as {one.name}"
    if not forecast.is_possible:
        return (
            f"none to be trusted: {best.name} was {times}, more than the ideal, so something has slowed {one.name} "
            f"down; {AGAIN}"
        )
    return f"{best.name} is the fastest here, {times}, {forecast.part(best):.0%} of the ideal"


def doubts(forecast: Forecast) -> Iterator[str]:
    """What makes the verdict less than sure."""
    for side in forecast.sides:
        low, high = side.timing.middle
        if high - low > UNSTEADY * side.timing.step:
            middle = f"the middle half is {in_words(low)} to {in_words(high)}"
            yield f"the steps of {side.name} are not alike ({middle}), or the machine is busy; {AGAIN}"
    one, best = forecast.one, forecast.best
    if best is not one and best.timing.middle[1] > one.timing.middle[0]:
        yield f"the times of a step on {best.name} and on {one.name} overlap; {AGAIN}"


def as_data(forecast: Forecast) -> str:
    """The same as JSON; all times are seconds of one step."""
    best = forecast.best
    data = {
        "target": forecast.asked.target,
        "fastest": {"name": best.name, "devices": best.devices} if forecast.is_possible else None,
        "verdict": verdict(forecast),
        "notes": list(doubts(forecast)),
        "sides": [_side(forecast, side) for side in forecast.sides],
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)


def _side(forecast: Forecast, side: Side) -> dict[str, Any]:
    timing = side.timing
    return {
        "name": side.name,
        "devices": [str(device) for device in side.plan.devices],
        "steps": timing.steps,
        "counted": timing.counted,
        "step": timing.step,
        "middle_half": list(timing.middle),
        "samples": timing.samples,
        "samples_per_second": side.samples_per_second,
        "times_as_fast": forecast.times(side),
        "of_the_ideal": forecast.part(side),
        "waiting": side.waited,
        "whole": timing.whole,
        "costliest": timing.costliest or None,
        "threads": timing.threads,
        "reasons": reasons(forecast, side) if is_short(forecast, side) else [],
    }
