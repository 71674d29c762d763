from __future__ import annotations

import pytest

from duoka.system.seconds import duration, in_words, per_second


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (0.000103, "103 µs")])
def test_words(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(0.5123, "0.5123"), (62.811, "62.81"), (13246.2, "13,246")])
def test_rates(rate: float, text: str) -> None:
    assert per_second(rate) == text
