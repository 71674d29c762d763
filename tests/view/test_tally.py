from __future__ import annotations

from time import sleep

import pytest

from duoka.view.tally import Tally


def test_operations_are_counted_and_timed_by_line() -> None:
    tally = Tally()
    for _ in range(3):
        with tally.timed("flip"):
            sleep(0.002)
    with tally.timed("sort"):
        pass
    (operation, line), times = tally.most_common(1)[0]
    assert (operation, times) == ("flip", 3)
    assert line.startswith("test_tally.py:")
    assert len(tally) == 2
    assert list(tally.shares()) == [place for place, _ in tally.seconds.most_common()]
    assert next(iter(tally.shares()))[0] == "flip"


def test_an_operation_that_fails_is_timed_too() -> None:
    tally = Tally()
    with pytest.raises(ValueError), tally.timed("flip"):
        raise ValueError
    assert sum(tally.values()) == len(tally.seconds) == 1


def test_shares_are_of_the_time_since_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 200.0, 210.0, 215.0, 220.0])  # made, first batch, begin and end of the operation, now
    monkeypatch.setattr("duoka.view.tally.perf_counter", lambda: next(times))
    tally = Tally()
    tally.begin()
    with tally.timed("flip"):
        pass
    assert [*tally.shares().values()] == [5 / 20]


@pytest.mark.parametrize(("now", "share"), [(70.0, "10%"), (120.0, None), (130.0, None)])
def test_the_total_is_worth_a_line_above_a_twentieth(
    monkeypatch: pytest.MonkeyPatch, now: float, share: str | None
) -> None:
    times = iter([0.0, 20.0, 30.0, 35.0, now])  # made, first batch, begin and end of the operation, now
    monkeypatch.setattr("duoka.view.tally.perf_counter", lambda: next(times))
    tally = Tally()
    tally.begin()
    with tally.timed("flip"):
        pass
    line = tally.warning()
    assert (line and line.partition(" ")[0]) == share
