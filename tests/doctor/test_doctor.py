from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator

import pytest

from duoka import doctor
from duoka.cli import main
from duoka.cli.doctor import lines, summary
from duoka.doctor import Finding
from tests.hardware.driver import play

SUBJECTS = {name: place for name, place in doctor.SUBJECTS.items() if name != "all-reduce"}


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SUBJECTS", SUBJECTS)
    main(["doctor"])
    text = capsys.readouterr().out
    for subject in (
        "python",
        "torch",
        "CUDA",
        "gloo",
        "cores",
        "threads",
        "memory",
        "shared memory",
        "open files",
        "clock",
    ):
        assert f"  {subject}  " in text
    assert main(["doctor", "--json"]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in findings} <= {"ok", "advice", "fault"}
    assert all((finding["why"] and finding["todo"]) or finding["level"] == "ok" for finding in findings)


def test_a_fault_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SUBJECTS", {"cards": SUBJECTS["cards"]})
    play(monkeypatch, "lost")
    assert main(["doctor"]) == 1
    assert "fault   GPU 1               GPU is lost" in capsys.readouterr().out
    play(monkeypatch, "one")
    assert main(["doctor"]) == 0


def test_a_subject_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(doctor, "SUBJECTS", {"odd": (__name__, "fails", 9.0)})
    monkeypatch.setattr(sys.modules[__name__], "fails", fails, raising=False)
    first, second = doctor.examine()
    assert first.subject == "first"
    assert (second.level, second.what) == ("advice", "could not be checked: ZeroDivisionError: oh")


def test_a_subject_that_hangs_is_a_finding_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hangs() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        over.wait(60)

    subjects = {"odd": (__name__, "hangs", 0.05), "disk": doctor.SUBJECTS["disk"]}
    monkeypatch.setattr(doctor, "SUBJECTS", subjects)
    monkeypatch.setattr(sys.modules[__name__], "hangs", hangs, raising=False)
    first, second, *others = doctor.examine()
    over.set()
    assert (first.subject, second.level, second.subject) == ("first", "fault", "odd")
    assert second.what == "could not be checked: no answer within 0.05 s"
    assert others[0].subject == "disk here"


def test_in_words() -> None:
    bad = Finding("fault", "disk", "full", "nothing fits", "make room")
    assert [line.split(maxsplit=1) for line in lines(bad)] == [
        ["fault", "disk                full"],
        ["why:", "nothing fits"],
        ["do:", "make room"],
    ]
    assert summary([bad, bad]) == "2 faults, no pieces of advice"
    assert summary([Finding("advice", "a", "b")]) == "no faults, 1 piece of advice"
