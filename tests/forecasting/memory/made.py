"""Records with given numbers."""

from __future__ import annotations

from duoka.forecasting.memory import MemoryForecast, MemoryRequest
from duoka.forecasting.moments import Event, MemoryRecord, Moment, Scope, Storage, Timeline, What
from tests.forecasting.made import ONE_DEVICE

MB = 10**6


class Story:
    """A record that is told event by event; sizes are MB."""

    def __init__(self, batch: int | None = 8) -> None:
        self.batch, self.steps, self.bound = batch, 3, 0
        self.storages: dict[int, Storage] = {}
        self.at_begin: list[int] = []
        self.events: list[Event] = []
        self.returned: dict[int, list[int]] = {}

    def add(self, size: float, scope: Scope, block: int = -1, call: int = -1) -> int:
        """Add a storage, and return its number."""
        number = len(self.storages)
        self.storages[number] = Storage(round(size * MB), scope, block, call)
        return number

    def alive(self, size: float, scope: Scope, block: int = -1) -> int:
        """Add a storage that is alive at the begin."""
        number = self.add(size, scope, block)
        self.at_begin.append(number)
        return number

    def make(self, size: float, scope: Scope, block: int = -1, call: int = -1) -> int:
        """Make a storage now."""
        number = self.add(size, scope, block, call)
        self.now("made", number)
        return number

    def now(self, what: What, number: int = 0) -> None:
        """Add an event."""
        self.events.append(Event(what, number))

    @property
    def moments(self) -> list[Moment]:
        """The moments so far."""
        return Timeline(self.storages, self.at_begin, self.events, self.returned).moments

    @property
    def record(self) -> MemoryRecord:
        """The record of these events."""
        scopes: dict[str, int] = {}
        for storage in (self.storages[number] for number in self.at_begin):
            scopes[storage.scope] = scopes.get(storage.scope, 0) + storage.size
        return MemoryRecord(self.steps, self.batch, self.bound, scopes, self.moments)


def forecast(story: Story, limits: list[int | None], devices: tuple[int, ...] = (1, 2, 4)) -> MemoryForecast:
    """Create a forecast. limits: bytes that each device has, for each number of devices."""
    names = [f"cpu:{count}" for count in devices]
    return MemoryForecast(MemoryRequest("train.py", ONE_DEVICE, names, devices, limits, (), None), story.record)
