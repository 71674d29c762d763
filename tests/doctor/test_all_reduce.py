from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from duoka.doctor import all_reduce
from duoka.doctor.all_reduce import AllReduceTimes, examine, free, judge
from duoka.hardware import inventory, locks
from tests.hardware.driver import play


def test_two_processes_are_measured() -> None:
    (finding,) = examine()
    assert finding.subject == "all-reduce (gloo)"
    assert finding.level in ("ok", "advice")  # the speed depends on other programs
    assert finding.what.startswith("2 ranks: ")


def test_what_hangs_or_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "LIMIT", 0.01)
    (finding,) = examine()
    assert (finding.level, finding.what) == ("fault", "not finished in 0.01 s")
    monkeypatch.setattr(all_reduce, "LIMIT", 60)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (finding,) = examine()
    assert (finding.level, finding.what) == ("fault", "no message")


def test_a_rank_that_fails_is_a_fault_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    (finding,) = examine()
    assert finding.level == "fault"
    assert "none-such" in finding.what


def test_only_cards_that_nobody_uses_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for recording, cards in (("eight", [1, 3, 4, 6, 7]), ("lost", [0]), ("mig", []), ("none", [])):
        play(monkeypatch, recording)
        assert [gpu.index for gpu in free(inventory.read().gpus)] == cards


def test_cards_are_measured_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake measuring process records its arguments."""
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path / "locks")
    answer = json.dumps(asdict(AllReduceTimes("nccl", 5, 1e-5, 200.0, 10.0)))
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/called\necho '{answer}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    (finding,) = examine()
    assert (tmp_path / "called").read_text().split()[2:] == ["cuda", "1", "3", "4", "6", "7"]
    assert "5 ranks: 10 µs for one number, 200.00 GB/s for 256 MiB; 12 NVLinks" in finding.what


@pytest.mark.parametrize(
    ("measured", "nvlinks", "level"),
    [
        (AllReduceTimes("gloo", 2, 1e-4, 1.0, 10.0), 0, "ok"),
        (AllReduceTimes("gloo", 2, 1e-4, 0.01, 10.0), 0, "advice"),
        (AllReduceTimes("gloo", 2, 1e-1, 1.0, 10.0), 0, "advice"),
        (AllReduceTimes("nccl", 8, 1e-5, 200.0, 10.0), 18, "ok"),
        (AllReduceTimes("nccl", 8, 1e-5, 20.0, 10.0), 18, "advice"),
        (AllReduceTimes("nccl", 2, 1e-5, 10.0, 10.0), 0, "ok"),
        (AllReduceTimes("nccl", 2, 1e-5, 1.0, 10.0), 0, "advice"),
    ],
)
def test_what_a_link_should_give(measured: AllReduceTimes, nvlinks: int, level: str) -> None:
    assert judge(measured, nvlinks).level == level
