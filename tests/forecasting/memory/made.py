"""Records with given numbers."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from duoka.forecasting.memory import DeviceSet, MemoryForecast, MemoryRequest
from duoka.forecasting.moments import MemoryRecord, Moment, Scope, Storage, Timeline
from tests.forecasting.made import ONE_DEVICE

MB = 10**6


class Story:
    """A record that is told event by event; sizes are MB."""

    def __init__(self, batch: int | None = 8) -> None:
        self.batch, self.steps, self.bound = batch, 3, 0
        self.timeline, self.scopes, self._next = Timeline(), Counter[str](), 0

    def add(self, size: float, scope: Scope, block: int = -1, call: int = -1) -> int:
        """Add a storage, and return its number; a gradient is known as one when it is accumulated."""
        number, self._next = self._next, self._next + 1
        made = Storage(round(size * MB), "constant" if scope == "gradient" else scope, block, call)
        self.timeline.make(number, made._replace(block=-1) if scope == "gradient" else made)
        self.timeline.classify(number, scope, block)
        return number

    def alive(self, size: float, scope: Scope, block: int = -1) -> int:
        """Add a storage that is alive at the begin."""
        assert not self.timeline.records
        self.scopes[scope] += round(size * MB)
        return self.add(size, scope, block)

    def make(self, size: float, scope: Scope, block: int = -1, call: int = -1) -> int:
        """Make a storage now."""
        self.begin()
        return self.add(size, scope, block, call)

    def begin(self, what: Literal["forward", "backward", "step"] | None = None) -> None:
        """Record from now on, and begin a pass or an optimizer's step."""
        if not self.timeline.records:
            self.timeline.record()
        if what is not None:
            self.timeline.begin(what)

    @property
    def moments(self) -> list[Moment]:
        """The moments so far."""
        self.begin()
        return self.timeline.moments

    @property
    def record(self) -> MemoryRecord:
        """The record of these events."""
        return MemoryRecord(self.steps, self.batch, self.bound, dict(self.scopes), self.moments)


def forecast(story: Story, limits: list[int | None], devices: tuple[int, ...] = (1, 2, 4)) -> MemoryForecast:
    """Create a forecast. limits: bytes that each device has, for each number of devices."""
    sets = [DeviceSet(f"cpu:{count}", count, limit) for count, limit in zip(devices, limits, strict=True)]
    return MemoryForecast(MemoryRequest("train.py", ONE_DEVICE, sets, (), None), story.record)
