"""Run a script's first steps on one CPU worker, and compute the peak memory of a device under each strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from duoka.errors import DuokaError
from duoka.forecasting.forecast import SEED
from duoka.forecasting.memory.moments import MemoryLayout, MemoryRecord, peak
from duoka.forecasting.memory.recorder import MemoryRecorder
from duoka.planning.plan import Kind, Plan
from duoka.trials.runner import NoSteps, trial_runner

STEPS = 3  # the first is not recorded: the optimizer makes its state in it
MOST_DEVICES = 1024  # the most for which a layout is calculated
ROOM = 0.9  # fraction of a device's memory that may be needed: the rest is for libraries and fragmentation


@dataclass(frozen=True)
class MemoryRequest:
    """A script to run, by a plan for one CPU worker.

    names: of the devices, in the syntax of `--devices`. devices: their numbers. limits: bytes that a device has, for
    each of these; None if not known. blocks: as `duoka run --blocks`. log_dir: where to keep the script's output, or
    None. choosing: end after the first step if the script needs less than the devices have in any case. machines: on
    which the devices are, equally many on each.
    """

    target: str
    plan: Plan
    names: Sequence[str]
    devices: Sequence[int]
    limits: Sequence[int | None]
    blocks: tuple[str, ...]
    log_dir: Path | None
    choosing: bool = False
    machines: int = 1

    @property
    def plenty(self) -> int:
        """Bytes of need below which the script fits in any case, so that one step is enough."""
        known = [limit for limit in self.limits if limit is not None]
        return int(ROOM * min(known)) if self.choosing and len(known) == len(self.limits) else 0


@dataclass(frozen=True)
class Need:
    """The peak of a layout, in bytes, and what each device has."""

    layout: MemoryLayout
    bytes: int
    limit: int | None

    @property
    def fits(self) -> bool:
        """True also if it is not known what a device has."""
        return self.limit is None or self.bytes <= ROOM * self.limit


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
        pairs = list(zip(self.request.devices, self.request.limits, strict=True))
        if self.record.steps == 1:
            return tuple(Need(self._layouts(devices)[0], self.record.bound, limit) for devices, limit in pairs)
        return tuple(
            Need(layout, peak(self.record, layout), limit)
            for devices, limit in pairs
            for layout in self._layouts(devices)
        )

    def of(self, devices: int) -> list[Need]:
        return [need for need in self.needs if need.layout.devices == devices]

    def advice(self, devices: int) -> Need | None:
        """Return the layout to take on so many devices: the first that fits; None if none does."""
        return next((need for need in self.of(devices) if need.fits), None)

    def enough(self, limit: int) -> MemoryLayout | None:
        """Return the first layout that fits on more devices of this size, the fewest in powers of two; None: none."""
        devices = self.request.devices[-1]
        while devices < MOST_DEVICES:
            devices *= 2
            for layout in self._layouts(devices):
                if Need(layout, peak(self.record, layout), limit).fits:
                    return layout
        return None

    def _layouts(self, devices: int) -> list[MemoryLayout]:
        return layouts(devices, self.request.plan.kind is Kind.PLAIN, self.request.machines)

    @cached_property
    def alone(self) -> int:
        return peak(self.record, MemoryLayout("single", 1))

    def total(self, *scopes: str) -> int:
        """Return the bytes of storages of these scopes that were alive when the recording began."""
        return sum(self.record.scopes.get(scope, 0) for scope in scopes)


def layouts(devices: int, is_plain: bool = True, machines: int = 1) -> list[MemoryLayout]:
    """Return the layouts on so many devices of all machines, the one that communicates or computes least first.

    is_plain: for plain scripts, which alone take all options.
    """
    if devices == 1:
        return [MemoryLayout("single", 1)]
    options = [MemoryLayout("ddp", devices, machines=machines)]
    for checkpoints in (False, True)[: 1 + is_plain]:
        if 1 < machines < devices:
            options.append(MemoryLayout("hsdp", devices, checkpoints, machines))
        options.append(MemoryLayout("fsdp", devices, checkpoints, machines))
    return options


def forecast_memory(request: MemoryRequest, say: Callable[[str], None]) -> MemoryForecast:
    """Run the first steps of the script. say: called with progress messages.

    Raises:
        TrialFailed: the script failed.
        NoSteps: it made no optimizer step.
        DuokaError: it made only one.
        Stopped: a signal asked for an end; all files are removed.
    """
    for_gpus = not request.names[-1].startswith("cpu")
    recorder = MemoryRecorder(STEPS, SEED, request.blocks, request.plenty, for_gpus)
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
