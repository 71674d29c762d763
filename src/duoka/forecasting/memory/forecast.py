"""Run a script's first steps on one CPU worker, and tell the peak memory of a device under each strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from duoka.forecasting.forecast import SEED
from duoka.forecasting.memory.record import MemoryRecord, read
from duoka.forecasting.memory.recorder import MemoryRecorder
from duoka.forecasting.memory.replay import Layout, peak
from duoka.plan import Plan
from duoka.trials.observer import TrialFolders
from duoka.trials.runner import NoSteps, trial_runner

STEPS = 3  # the first is not recorded: the optimizer makes its state in it


@dataclass(frozen=True)
class MemoryRequest:
    """A script to run, by a plan for one CPU worker.

    devices: numbers of devices. limits: bytes that a device has, for each number of devices; None if not known.
    blocks: as `duoka run --blocks`. log_dir: where to keep the script's output, or None.
    """

    target: str
    plan: Plan
    devices: Sequence[int]
    limits: Sequence[int | None]
    blocks: tuple[str, ...]
    log_dir: Path | None


@dataclass(frozen=True)
class Need:
    """The peak of a layout, in bytes, and what each device has."""

    layout: Layout
    bytes: int
    limit: int | None

    @property
    def fits(self) -> bool:
        """True also if it is not known what a device has."""
        return self.limit is None or self.bytes <= self.limit


@dataclass(frozen=True)
class MemoryForecast:
    """The result."""

    request: MemoryRequest
    record: MemoryRecord

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """All layouts, by the number of devices, the one that communicates least first."""
        found = []
        for devices, limit in zip(self.request.devices, self.request.limits, strict=True):
            for layout in layouts(devices):
                found.append(Need(layout, peak(self.record, layout), limit))
        return tuple(found)

    def of(self, devices: int) -> list[Need]:
        """Return the layouts on so many devices."""
        return [need for need in self.needs if need.layout.devices == devices]

    def advice(self, devices: int) -> Need | None:
        """Return the layout to take on so many devices: the first that fits; None if none does."""
        return next((need for need in self.of(devices) if need.fits), None)

    def total(self, *scopes: str) -> int:
        """Return the bytes of storages of these scopes that were alive when the recording began."""
        alive = (self.record.storages[number] for number in self.record.alive)
        return sum(storage.size for storage in alive if storage.scope in scopes)


def layouts(devices: int) -> list[Layout]:
    """Return the layouts on so many devices."""
    if devices == 1:
        return [Layout("single", 1)]
    return [Layout("ddp", devices), Layout("fsdp", devices), Layout("fsdp", devices, checkpoints=True)]


def forecast_memory(request: MemoryRequest, say: Callable[[str], None]) -> MemoryForecast:
    """Run the first steps of the script. say: called with progress messages.

    Raises:
        TrialFailed: the script failed.
        NoSteps: it made no optimizer step, or only one.
        Stopped: a signal asked for an end; all files are removed.
    """

    def recorder(folders: TrialFolders) -> MemoryRecorder:
        return MemoryRecorder(folders, STEPS, SEED, False, request.blocks)

    name = "cpu:1"
    say(f"running {STEPS} steps on one CPU worker")
    with trial_runner("forecast", request.log_dir) as trials, trials.run(name, request.plan, recorder) as folder:
        record = read(folder)
    if record.steps < 2:
        raise NoSteps(name, "measure in a second step")
    return MemoryForecast(request, record)
