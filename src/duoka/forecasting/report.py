"""A forecast as a page of HTML: its table as charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from duoka.forecasting.forecast import Forecast, TimedRun
from duoka.forecasting.showing import cells, columns, doubts, sentences, title, verdict
from duoka.system.messages import in_words
from duoka.watching.history import Point
from duoka.watching.html import Axis, Line, area_chart, document, head, line_chart, listed, table


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
    one = forecast.baseline.timing.step
    top = max(run.timing.middle[1] for run in forecast.runs)
    lines = [
        _line(forecast, "measured", "c5", lambda run: run.timing.step),
        _line(forecast, "ideal: that of one device, divided by their number", "c0", lambda run: one / run.devices),
        _line(forecast, "the fastest quarter is below", "c1", lambda run: run.timing.middle[0]),
        _line(forecast, "the slowest quarter is above", "c2", lambda run: run.timing.middle[1]),
    ]
    yield line_chart("Seconds of a step, against devices", _axis(forecast, top), lines)
    rates = [run.samples_per_second for run in forecast.runs]
    known = [rate for rate in rates if rate is not None]
    if len(known) == len(rates):
        most = max([*known, known[0] * forecast.runs[-1].devices])
        axis = _axis(forecast, most, f"{most:,.4g}")
        ideal = _line(forecast, "ideal", "c0", lambda run: known[0] * run.devices)
        measured = _line(forecast, "measured", "c5", lambda run: run.samples_per_second or 0)
        yield line_chart("Samples a second", axis, [measured, ideal])
    layers = [
        _line(forecast, "each rank by itself", "c1", lambda run: run.timing.step - _lost(run)),
        _line(forecast, "what every rank computes whole", "c4", lambda run: run.timing.whole),
        _line(forecast, "waiting for other ranks", "c3", lambda run: run.waited or 0.0),
    ]
    yield area_chart("Parts of a step", _axis(forecast, max(run.timing.step for run in forecast.runs)), layers)


def _lost(run: TimedRun) -> float:
    return min(run.timing.step, run.timing.whole + (run.waited or 0.0))


def _line(forecast: Forecast, name: str, style: str, value: Callable[[TimedRun], float]) -> Line:
    return Line(name, style, [[Point(math.log2(run.devices), value(run)) for run in forecast.runs]])


def _axis(forecast: Forecast, top: float, high: str = "") -> Axis:
    """Return axes on which each doubling of devices is as wide as the others."""
    ticks = [(math.log2(run.devices), run.name) for run in forecast.runs]
    return Axis(ticks[0][0], ticks[-1][0], top, high or in_words(top), ticks=ticks)
