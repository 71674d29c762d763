from __future__ import annotations

import sys

import pytest

from duoka.doctor import exchange
from duoka.doctor.exchange import Measured, examine, judge


def test_two_processes_are_measured() -> None:
    (finding,) = examine()
    assert finding.subject == "all-reduce (gloo)"
    assert finding.level in ("ok", "advice")  # how fast it is depends on what else is running
    assert finding.what.startswith("2 ranks: ")


def test_what_hangs_or_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LIMIT", 0.01)
    (finding,) = examine()
    assert (finding.level, finding.what) == ("fault", "not finished in 0.01 s")
    monkeypatch.setattr(exchange, "LIMIT", 60)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (finding,) = examine()
    assert (finding.level, finding.what) == ("fault", "no word")


@pytest.mark.parametrize(
    ("measured", "nvlinks", "level"),
    [
        (Measured("gloo", 2, 1e-4, 1.0, 10.0), 0, "ok"),
        (Measured("gloo", 2, 1e-4, 0.01, 10.0), 0, "advice"),
        (Measured("gloo", 2, 1e-1, 1.0, 10.0), 0, "advice"),
        (Measured("nccl", 8, 1e-5, 200.0, 10.0), 18, "ok"),
        (Measured("nccl", 8, 1e-5, 20.0, 10.0), 18, "advice"),
        (Measured("nccl", 2, 1e-5, 10.0, 10.0), 0, "ok"),
        (Measured("nccl", 2, 1e-5, 1.0, 10.0), 0, "advice"),
    ],
)
def test_what_a_link_should_give(measured: Measured, nvlinks: int, level: str) -> None:
    assert judge(measured, nvlinks).level == level
