"""A forecast of memory as a table with a verdict, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from rich.table import Table

from duoka.forecasting.memory.forecast import ROOM, MemoryForecast, Need
from duoka.forecasting.memory.moments import MemoryLayout
from duoka.trials.runner import render_table

PARTS = {"parameters": ("parameter",), "gradients": ("gradient",), "the optimizer's state": ("state",)}


def as_text(forecast: MemoryForecast, verbosity: str) -> str:
    """Format the whole result; with `quiet`, only the verdict."""
    last = f"verdict: {verdict(forecast)}"
    if verbosity == "quiet":
        return last
    notes = [f"note: {note}" for note in doubts(forecast)]
    return "\n".join([render_table(_table(forecast)), parts(forecast), *notes, last])


def _table(forecast: MemoryForecast) -> Table:
    title = f"calculated from {forecast.record.steps} steps of {forecast.request.target} on one CPU worker"
    table = Table(title=title, title_justify="left")
    for name in ("devices", "strategy", "peak of each", "it has", "fits"):
        table.add_column(name, justify="right" if name in ("peak of each", "it has") else "left")
    for name, need in zip(_names(forecast), forecast.needs, strict=True):
        has = "not known" if need.limit is None else in_bytes(need.limit)
        fits = "" if need.limit is None else "yes" if need.fits else "no"
        table.add_row(name, words(need.layout), in_bytes(need.bytes), has, fits)
    return table


def _names(forecast: MemoryForecast) -> list[str]:
    names = dict(zip(forecast.request.devices, forecast.request.names, strict=True))
    return [names[need.layout.devices] for need in forecast.needs]


def words(layout: MemoryLayout) -> str:
    """Name a layout: its strategy, and the option of `duoka run` that belongs to it."""
    return f"{layout.strategy}{' --checkpoint-activations' * layout.checkpoints}"


def parts(forecast: MemoryForecast) -> str:
    """Describe the parts of the peak on one device."""
    known = {name: forecast.total(*scopes) for name, scopes in PARTS.items()}
    rest = max(0, forecast.alone - sum(known.values()))
    listed = ", ".join(f"{in_bytes(size)} of {name}" for name, size in known.items())
    return f"on one device: {listed}, {in_bytes(rest)} of activations and others at the peak"


def verdict(forecast: MemoryForecast) -> str:
    """Name the strategy to take on the devices asked for, and the fewest devices that are enough."""
    most = forecast.request.devices[-1]
    name = forecast.request.names[-1]
    need = forecast.advice(most)
    if need is None:
        least = min(forecast.of(most), key=lambda need: need.bytes)
        return (
            f"nothing fits on {name}: the least is {in_bytes(least.bytes)} of each device's "
            f"{in_bytes(least.limit or 0)}, with {words(least.layout)}; {_what_would_fit(forecast, least.limit or 0)}"
        )
    enough = next(devices for devices in forecast.request.devices if forecast.advice(devices) is not None)
    fewest = f"; {forecast.request.names[forecast.request.devices.index(enough)]} is enough" * (enough < most)
    return f"{words(need.layout)} on {name}, {in_bytes(need.bytes)} of each device{_why(forecast, need)}{fewest}"


def _what_would_fit(forecast: MemoryForecast, limit: int) -> str:
    layout = forecast.enough(limit)
    if layout is None:
        return "more devices are not enough: use a smaller batch, or a smaller model"
    return f"{layout.devices} devices of this size are enough, with {words(layout)}; or use a smaller batch"


def choice(forecast: MemoryForecast, need: Need) -> str:
    """Say in a line why a run takes a layout."""
    layout = words(need.layout)
    if need.limit is None:
        return f"--strategy auto: {layout}, as it is not known how much memory the devices have"
    size = "at most " * (forecast.record.steps == 1) + in_bytes(need.bytes)
    why = _why(forecast, need)
    return f"--strategy auto: {layout} needs {size} of each device's {in_bytes(need.limit)}{why}"


def _why(forecast: MemoryForecast, need: Need) -> str:
    """Name the layouts that would communicate or compute less, and do not fit."""
    first = takewhile(lambda other: other is not need, forecast.of(need.layout.devices))
    before = [other for other in first if not other.fits and other.bytes > need.bytes]
    if not before:
        return ""
    listed = " and ".join(f"{words(other.layout)} needs {in_bytes(other.bytes)}" for other in before)
    return f" ({listed}, more than {ROOM:.0%} of its {in_bytes(need.limit or 0)})"


def doubts(forecast: MemoryForecast) -> Iterator[str]:
    """Yield sentences about the forecast's limits."""
    record = forecast.record
    if record.batch is None:
        yield "no model was called, so what grows with the batch is not known: all is counted as whole on each device"
    elif record.batch < forecast.request.devices[-1]:
        yield f"a batch of {record.batch} is computed whole by each of more devices than that"


def in_bytes(size: float) -> str:
    """Format bytes: `12.3 MB`, `4.56 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:,.3g} kB"


def as_data(forecast: MemoryForecast) -> str:
    """Return the forecast as JSON; sizes are bytes."""
    advice = forecast.advice(forecast.request.devices[-1])
    data: dict[str, Any] = {
        "target": forecast.request.target,
        "take": None if advice is None else _layout_data(advice.layout),
        "verdict": verdict(forecast),
        "notes": list(doubts(forecast)),
        "batch": forecast.record.batch,
        "one_device": {name: forecast.total(*scopes) for name, scopes in PARTS.items()},
        "layouts": [
            {**_layout_data(need.layout), "peak": need.bytes, "has": need.limit, "fits": need.fits}
            for need in forecast.needs
        ],
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)


def _layout_data(layout: MemoryLayout) -> dict[str, Any]:
    return {
        "strategy": layout.strategy,
        "devices": layout.devices,
        "checkpoint_activations": layout.checkpoints,
    }
