"""Records with given numbers."""

from __future__ import annotations

from duoka.forecasting.memory.forecast import MemoryForecast, MemoryRequest
from duoka.forecasting.memory.record import MemoryEvent, MemoryRecord, Scope, Storage, What
from tests.forecasting.made import ONE_DEVICE

MB = 10**6


class Story:
    """A record that is told event by event; sizes are MB."""

    def __init__(self, batch: int | None = 8) -> None:
        self.record = MemoryRecord(steps=3, batch=batch)

    def add(self, size: float, scope: Scope, group: int = -1, call: int = -1) -> int:
        """Add a storage, and return its number."""
        number = len(self.record.storages)
        self.record.storages[number] = Storage(round(size * MB), scope, group, 1000, call)
        return number

    def alive(self, size: float, scope: Scope, group: int = -1) -> int:
        """Add a storage that is alive at the begin."""
        number = self.add(size, scope, group)
        self.record.alive.append(number)
        return number

    def make(self, size: float, scope: Scope, group: int = -1, call: int = -1) -> int:
        """Make a storage now."""
        number = self.add(size, scope, group, call)
        self.now("made", number)
        return number

    def now(self, what: What, number: int = 0) -> None:
        """Add an event."""
        self.record.events.append(MemoryEvent(what, number))


def forecast(story: Story, limits: list[int | None], devices: tuple[int, ...] = (1, 2, 4)) -> MemoryForecast:
    """Create a forecast. limits: bytes that each device has, for each number of devices."""
    names = [f"cpu:{count}" for count in devices]
    return MemoryForecast(MemoryRequest("train.py", ONE_DEVICE, names, devices, limits, (), None), story.record)
