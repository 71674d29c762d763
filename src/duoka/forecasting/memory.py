"""Run a script's first steps on one CPU worker, and print the peak memory of a device under each strategy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from duoka.errors import DuokaError
from duoka.forecasting.forecast import SEED
from duoka.forecasting.memory_recorder import MemoryRecorder
from duoka.forecasting.moments import MemoryLayout, MemoryRecord, on_host, peak
from duoka.hardware import machine
from duoka.planning.plan import Kind, Plan
from duoka.trials.runner import NoSteps, render_table, trial_runner

STEPS = 3  # the first is not recorded: the optimizer makes its state in it
MOST_DEVICES = 1024  # the most for which a layout is calculated
ROOM = 0.9  # fraction of a device's memory that may be needed: the rest is for libraries and fragmentation


class DeviceSet(NamedTuple):
    """Devices to forecast for. name: for the user. number: on all machines. limit: bytes of each; None: not known."""

    name: str
    number: int
    limit: int | None


@dataclass(frozen=True)
class MemoryRequest:
    """A script to run, by a plan for one CPU worker."""

    target: str
    plan: Plan
    sets: Sequence[DeviceSet]  # to forecast for, the largest last
    blocks: tuple[str, ...]  # as `duoka run --blocks`
    log_dir: Path | None  # where to keep the script's output
    choosing: bool = False  # end after the first step if the script needs less than the devices have in any case
    machines: int = 1  # on which the devices are, equally many on each

    @property
    def for_gpus(self) -> bool:
        return not self.sets[-1].name.startswith("cpu")

    @property
    def plenty(self) -> int:
        """Bytes of need below which the script fits in any case, so that one step is enough."""
        known = [devices.limit for devices in self.sets if devices.limit is not None]
        return int(ROOM * min(known)) if self.choosing and len(known) == len(self.sets) else 0


@dataclass(frozen=True)
class Need:
    """The peak of a layout, in bytes, and what each device has. host: bytes in the memory of each machine."""

    layout: MemoryLayout
    bytes: int
    limit: int | None
    host: int = 0

    @property
    def fits(self) -> bool:
        """True also if it is not known what a device has."""
        has_room = self.host <= ROOM * (machine.read().memory or math.inf)
        return has_room and (self.limit is None or self.bytes <= ROOM * self.limit)


@dataclass(frozen=True)
class MemoryForecast:
    """The result."""

    request: MemoryRequest
    record: MemoryRecord

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """All layouts, by the number of devices, the one that communicates least first.

        After one step that shows that the script fits: ddp alone, with the most that it may need.
        """
        if self.record.steps == 1:
            return tuple(Need(self._layouts(at.number)[0], self.record.bound, at.limit) for at in self.request.sets)
        return tuple(need for at in self.request.sets for need in self._calculated(at.number, at.limit))

    def _calculated(self, devices: int, limit: int | None) -> Iterator[Need]:
        for layout in self._layouts(devices):
            yield Need(layout, peak(self.record, layout), limit, on_host(self.record, layout))

    def needs_on(self, devices: int) -> list[Need]:
        return [need for need in self.needs if need.layout.devices == devices]

    def advice(self, devices: int) -> Need | None:
        """Return the layout to take on so many devices: the first that fits; None if none does."""
        return next((need for need in self.needs_on(devices) if need.fits), None)

    def enough(self, limit: int) -> MemoryLayout | None:
        """Return the first layout that fits on more devices of this size, the fewest in powers of two; None: none."""
        devices = self.request.sets[-1].number
        while devices < MOST_DEVICES:
            devices *= 2
            for need in self._calculated(devices, limit):
                if need.fits:
                    return need.layout
        return None

    def _layouts(self, devices: int) -> list[MemoryLayout]:
        """Return the layouts on so many devices of all machines, that which communicates or computes least first."""
        machines = self.request.machines
        if devices == 1:
            return [MemoryLayout("single", 1)]
        sharded: list[Literal["hsdp", "fsdp"]] = ["hsdp", "fsdp"] if 1 < machines < devices else ["fsdp"]
        is_plain = self.request.plan.kind is Kind.PLAIN  # others do not take all options
        return [
            MemoryLayout("ddp", devices, machines=machines),
            *(
                MemoryLayout(strategy, devices, checkpoints, machines, offloads)
                for offloads in (False, True)[: 1 + (is_plain and self.request.for_gpus)]
                for checkpoints in (False, True)[: 1 + is_plain]
                for strategy in sharded
            ),
        ]

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part of `PARTS` that were alive when the recording began."""
        return {name: self.record.scopes.get(scope, 0) for name, scope in PARTS.items()}


def forecast_memory(request: MemoryRequest, say: Callable[[str], None]) -> MemoryForecast:
    """Run the first steps of the script. say: called with progress messages.

    Raises TrialFailed if the script failed, NoSteps if it made no step of an optimizer, DuokaError if it made only
    one, and Stopped if a signal asked for an end.
    """
    recorder = MemoryRecorder(STEPS, SEED, request.blocks, request.plenty, request.for_gpus)
    name = "cpu:1"
    most, why = ("at most ", ", to choose a strategy") if request.choosing else ("", "")
    say(f"running {most}{STEPS} steps on one CPU worker{why}")
    with trial_runner("forecast", request.log_dir) as trials, trials.run(name, request.plan, recorder) as folder:
        record = MemoryRecord.read(folder)
    if record.steps == 0:
        raise NoSteps(name, "tell")
    if record.steps == 1 and record.bound > request.plenty:
        raise DuokaError(
            f"{name}: the script ended after one step, and memory is calculated from the second step on, when the "
            "optimizer has its state; give it more data or epochs"
        )
    return MemoryForecast(request, record)


# The result as text and as JSON.

PARTS = {"parameters": "parameter", "gradients": "gradient", "the optimizer's state": "state"}


def as_text(forecast: MemoryForecast, verbosity: str) -> str:
    """Format the whole result; with `quiet`, only the verdict."""
    last = f"verdict: {verdict(forecast)}"
    if verbosity == "quiet":
        return last
    notes = [f"note: {note}" for note in doubts(forecast)]
    title = f"calculated from {forecast.record.steps} steps of {forecast.request.target} on one CPU worker"
    names = {devices.number: devices.name for devices in forecast.request.sets}
    rows = []
    for need in forecast.needs:
        has = "not known" if need.limit is None else in_bytes(need.limit)
        fits = "" if need.limit is None else "yes" if need.fits else "no"
        rows.append((names[need.layout.devices], words(need.layout), in_bytes(need.bytes), has, fits))
    table = render_table(
        title, ("devices", "strategy", "peak of each", "it has", "fits"), rows, ("peak of each", "it has")
    )
    return "\n".join([table, parts(forecast), *notes, last])


def words(layout: MemoryLayout) -> str:
    """Name a layout: its strategy, and the options of `duoka run` that belong to it."""
    checkpoints, offloads = " --checkpoint-activations" * layout.checkpoints, " --cpu-offload" * layout.offloads
    return f"{layout.strategy}{checkpoints}{offloads}"


def parts(forecast: MemoryForecast) -> str:
    """Describe the parts of the peak on one device."""
    rest = max(0, peak(forecast.record, MemoryLayout("single", 1)) - sum(forecast.parts.values()))
    listed = ", ".join(f"{in_bytes(size)} of {name}" for name, size in forecast.parts.items())
    return f"on one device: {listed}, {in_bytes(rest)} of activations and others at the peak"


def verdict(forecast: MemoryForecast) -> str:
    """Name the strategy to take on the devices asked for, and the fewest devices that are enough."""
    name, most, limit = forecast.request.sets[-1]
    need = forecast.advice(most)
    if need is None:
        least = min(forecast.needs_on(most), key=lambda need: need.bytes)
        layout = forecast.enough(limit or 0)
        advice = "more devices are not enough: use a smaller batch, or a smaller model"
        if layout is not None:
            advice = f"{layout.devices} devices of this size are enough, with {words(layout)}; or use a smaller batch"
        return (
            f"nothing fits on {name}: the least is {in_bytes(least.bytes)} of each device's "
            f"{in_bytes(limit or 0)}, with {words(least.layout)}; {advice}"
        )
    enough = next(devices for devices in forecast.request.sets if forecast.advice(devices.number) is not None)
    fewest = f"; {enough.name} is enough" * (enough.number < most)
    host = f" and {in_bytes(need.host)} of each machine's memory" * bool(need.host)
    return (
        f"{words(need.layout)} on {name}, {in_bytes(need.bytes)} of each device{host}{_why(forecast, need)}{fewest}"
    )


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
    first = takewhile(lambda other: other is not need, forecast.needs_on(need.layout.devices))
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
    elif record.batch < forecast.request.sets[-1].number:
        yield f"a batch of {record.batch} is computed whole by each of more devices than that"


def in_bytes(size: float) -> str:
    """Format bytes: `12.3 MB`, `4.56 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:,.3g} kB"


def as_data(forecast: MemoryForecast) -> str:
    """Return the forecast as JSON; sizes are bytes."""
    advice = forecast.advice(forecast.request.sets[-1].number)
    data: dict[str, Any] = {
        "target": forecast.request.target,
        "take": None if advice is None else _layout_data(advice.layout),
        "verdict": verdict(forecast),
        "notes": list(doubts(forecast)),
        "batch": forecast.record.batch,
        "one_device": forecast.parts,
        "layouts": [
            {**_layout_data(need.layout), "peak": need.bytes, "has": need.limit, "host": need.host, "fits": need.fits}
            for need in forecast.needs
        ],
    }
    return json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)


def _layout_data(layout: MemoryLayout) -> dict[str, Any]:
    options = {"checkpoint_activations": layout.checkpoints, "cpu_offload": layout.offloads}
    return {"strategy": layout.strategy, "devices": layout.devices, **options}
