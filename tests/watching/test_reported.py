from __future__ import annotations

import os
from pathlib import Path

import pytest

from duoka.watching import history
from duoka.watching.record import published_runs
from duoka.watching.reported import ReportedRun
from tests.launchers.made import plan


def test_two_attempts_and_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SHORTEST", 0.0)
    said: list[str] = []
    run = ReportedRun(plan(), tmp_path / "report.html", said.append, tmp_path)
    for attempt in range(2):
        board = run.begin(attempt, range(2))
        run.started([os.getpid()] * 2)
        for step in (1, 2):
            for rank in range(2):
                board.slot(rank).step(step)
            board.script_output.log(step, {"loss": 1.0 / (attempt + step)})
            board.script_output.print(f"attempt {attempt} step {step}", redrawn=False)
            run.look()
        if attempt == 0:
            run.failed("rank 1 was killed", "duoka: rank 1 <died>")
    for rank in range(2):
        board.slot(rank).step(9)
    run.ended(3)
    (record,) = published_runs(tmp_path)
    assert (record.code, record.faults, record.reports) == (3, ("rank 1 was killed",), ("duoka: rank 1 <died>",))
    run.close()
    text = (tmp_path / "report.html").read_text()
    assert "ended with exit code 3" in text
    assert " · 9 steps, " in text
    assert "rank 1 was killed</summary><pre>duoka: rank 1 &lt;died&gt;</pre>" in text
    assert "restart 1</li>" in text
    assert "<h2>loss</h2>" in text
    assert "attempt 1 step 2</pre>" in text
    assert said == []
    assert list(published_runs(tmp_path)) == []


def test_a_report_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    said: list[str] = []
    ReportedRun(plan(), tmp_path / "report.html", said.append, tmp_path).close()
    assert said == [f"the report cannot be written to {tmp_path / 'report.html'}: Is a directory"]
    assert list(tmp_path.glob(".report*")) == []
