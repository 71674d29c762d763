from __future__ import annotations

import pytest

from duoka.errors import DevicesBusy
from duoka.hardware import allocation
from duoka.hardware.allocation import STEP, until_free


class Clock:
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(allocation, "time", clock)
    return clock


def after(looks: list[str]) -> object:
    """Return a function that raises DevicesBusy for these users in turn, then succeeds."""
    waiting = iter(looks)

    def take() -> str:
        for users in waiting:
            raise DevicesBusy("busy", users)
        return "taken"

    return take


def test_it_waits_until_they_are_free_and_says_for_whom_once(clock: Clock) -> None:
    said: list[str] = []
    take = after(["bob", "bob", "bob and ann", "ann"])
    assert until_free(take, 60, said.append) == "taken"
    assert said == [f"waiting for devices: {who}" for who in ("bob", "bob and ann", "ann")]
    assert clock.now == 4 * STEP


@pytest.mark.parametrize(("limit", "end"), [(0, 0), (5, 5), (6, 6)])
def test_it_gives_up_when_the_time_is_over(clock: Clock, limit: float, end: float) -> None:
    with pytest.raises(DevicesBusy):
        until_free(after(["bob"] * 100), limit, lambda text: None)
    assert clock.now == end
