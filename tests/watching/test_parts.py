from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from duoka.watching.parts import parts
from duoka.watching.sample import RankSample

BEFORE: dict[str, Any] = {"waited": 5.0, "loaded": 3.0, "ran": 40.0, "queued": 1.0}


@pytest.mark.parametrize(
    ("more", "expected"),  # waiting, loading, computing, queued, rest
    [
        ({}, (0, 0, 0, 0, 1)),
        ({"waited": 1, "loaded": 2, "ran": 4, "queued": 0.5}, (0.1, 0.2, 0.4, 0.05, 0.25)),
        ({"waited": 4, "ran": 10}, (0.4, 0, 0.6, 0, 0)),  # it has polled
        ({"loaded": 4, "ran": 5, "queued": 5}, (0, 0.4, 0.5, 0.1, 0)),  # it has loaded itself
        ({"waited": 15, "loaded": 5}, (0.75, 0.25, 0, 0, 0)),  # the wait began before
    ],
)
def test_the_parts_of_ten_seconds(more: dict[str, float], expected: tuple[float, ...]) -> None:
    after = {name: value + more.get(name, 0) for name, value in BEFORE.items()}
    found = parts(RankSample(0, 1, 100.0, **BEFORE), RankSample(0, 1, 110.0, **after))
    assert astuple(found) == pytest.approx(expected)
    assert sum(astuple(found)) == pytest.approx(1)


def test_no_time_has_no_parts() -> None:
    with pytest.raises(ValueError, match="0 s apart"):
        parts(RankSample(0, 1), RankSample(0, 1))
