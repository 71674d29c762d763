from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from duoka.devices import inventory, locks
from duoka.doctor import exchange
from duoka.doctor.exchange import Measured, examine, free, judge
from tests.devices.driver import play


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


def test_only_cards_that_nobody_uses_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for recording, cards in (("eight", [1, 3, 4, 6, 7]), ("lost", [0]), ("mig", []), ("none", [])):
        play(monkeypatch, recording)
        assert [gpu.index for gpu in free(inventory.read().gpus)] == cards


def test_cards_are_measured_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring process is a stand-in: it writes down what it was called with."""
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "_folder_of_this_user", lambda: tmp_path / "locks")
    answer = json.dumps(asdict(Measured("nccl", 5, 1e-5, 200.0, 10.0)))
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/called\necho '{answer}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    (finding,) = examine()
    assert (tmp_path / "called").read_text().split()[2:] == ["nccl", "1", "3", "4", "6", "7"]
    assert "5 ranks: 10 µs for one number, 200.00 GB/s for 256 MiB; 12 NVLinks" in finding.what


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
