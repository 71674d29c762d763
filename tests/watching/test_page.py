from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from duoka.hardware.gpu import Gpu
from duoka.supervision.rings import LoggedValue
from duoka.watching import history as histories
from duoka.watching.history import MOST, SHORTEST, History, RunEvent
from duoka.watching.page import ReportedRun, RunEnd, WatchedRun, page, serving
from duoka.watching.record import FollowedRun, PublishedRun, published_runs
from tests.launchers.made import plan
from tests.watching.made import record, sample


def history(seconds: int = 10, ranks: int = 2) -> History:
    """A run with a step each second, of which rank 0 waits for half."""
    found = History(0.0)
    found.begin()
    for second in range(seconds + 1):
        counters: dict[str, Any] = {"steps": second + 1, "ran": 0.5 * second, "memory": 1 << 20}
        waits = counters | {"waited": 0.5 * second}
        found.add(sample(float(second), waits, *[counters | {"ran": 1.0 * second}] * (ranks - 1)))
    found.finish()
    return found


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects the names and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_shares_that_have_changed_are_drawn() -> None:
    seen = History(0.0)
    seen.begin()
    for second, sizes in enumerate(((0, 0), (8, 8), (12, 4))):
        seen.add(sample(float(second), *[{"rows": rows, "seconds_of_row": 0.002, "steps": second} for rows in sizes]))
    seen.finish()
    text = page(record(), seen, RunEnd(0, 2.0))
    assert "<th>rows</th><th>a row</th>" in text
    assert re.findall(r"<td>(\d+)</td><td>2 ms</td>", text) == ["12", "4"]
    assert "<h2>Rows of each rank</h2>" in text
    assert "Rows of each rank" not in page(record(), history(), RunEnd(0, 10.0))


def test_the_report_of_a_run() -> None:
    seen = history()
    seen.log([LoggedValue(5.0, "loss", 1, 0.5), LoggedValue(5.0, "loss", 2, float("nan"))])
    text = page(record(name="train.py"), seen, RunEnd(0, 10.0))
    assert "<h1>train.py: ended well</h1>" in text
    assert "took 0:10 · 2 workers on CPU · 11 steps, 1 s each" in text
    assert "waiting for others 25%: rank 1 is the slowest in 100% of readings: it computes more" in text
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "What stands out",
        "The time of each rank",
        "Seconds of a step",
        "Parts of the time, mean of all ranks",
        "loss",
        "Memory of each process",
    ]
    # All steps take 1 s, the top of the axis; rank 0 computes for half of each.
    whole, first, second = re.findall(r'class="line c\d" d="([^"]*)"', text)[:3]
    assert set(re.findall(r"[ML][\d.]+ ([\d.]+)", whole)) == {"0.0"}
    assert set(re.findall(r"[ML][\d.]+ ([\d.]+)", first)) == {"120.0"}
    assert second == whole


def test_the_start_is_no_part_of_a_step() -> None:
    seen = History(0.0)
    seen.begin()
    for second, steps in enumerate([0, 0, 0, 0, 1, 3, 5]):
        seen.add(sample(float(second), {"steps": steps, "samples": 10 * steps}))
    text = page(record(1), seen, RunEnd(0, 10.0))
    assert " · 5 steps, 500 ms each · 20 samples/s" in text


def test_memory_and_use_of_the_gpus() -> None:
    seen = history()
    for second in range(11):
        seen.look_at(float(second), {"GPU 0": gpu(second << 30, 100), "GPU 1": gpu(5 << 30, None)})
    text = page(record(devices=("GPU 0", "GPU 1")), seen, RunEnd(0, 10.0))
    memory = text.split("<h2>Memory of each GPU</h2>")[1]
    first, second = re.findall(r'class="line c\d" d="([^"]*)"', memory)[:2]
    assert first.startswith("M0.0 240.0 L100.0 216.0 ")
    assert second.startswith("M0.0 120.0 L100.0 120.0 ")
    use = text.split("<h2>Use of each GPU</h2>")[1]
    assert re.findall(r'class="line c\d" d="M0.0 0.0 ', use) == ['class="line c1" d="M0.0 0.0 ']


def gpu(used: int, utilisation: int | None) -> Gpu:
    return Gpu(0, "GPU-0", "H200", 140 << 30, used, utilisation)


def test_faults_are_marks_and_lines() -> None:
    seen = history()
    seen.events.append(RunEvent(4.0, "rank 1 was killed by SIGKILL"))
    text = page(record(attempt=1), seen, RunEnd(137, 10.0))
    assert "train.py: ended with exit code 137" in text
    assert "<li>0:04 rank 1 was killed by SIGKILL</li>" in text
    assert text.count('<path class="mark" d="M400.0 0 V240">') == 3  # in each chart


@pytest.mark.parametrize("sees_waits", [True, False])
def test_it_needs_nothing_else_and_runs_nothing(sees_waits: bool) -> None:
    text = page(record(name="<script>alert(1)</script>", sees_waits=sees_waits), history(), RunEnd(0, 10.0))
    tags = Tags(text)
    assert tags.open == []
    assert "<script" not in text
    assert {value for name, value in tags.attributes if name in ("src", "href")} == {"data:,"}
    assert "url(" not in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert ("waits for other ranks" in text) is sees_waits


def test_a_run_without_two_looks() -> None:
    text = page(record(), History(0.0), RunEnd(None, 0.1))
    assert "train.py: did not run" in text
    assert "too short for two samples" in text


def test_the_report_of_many_steps_and_ranks_is_small() -> None:
    seen = history(seconds=int(2 * MOST * SHORTEST), ranks=100)
    text = page(record(100), seen, RunEnd(0, 1e4))
    assert len(text) < 1_000_000
    assert "The 8 slowest of 100 ranks." in text
    assert text.count("<tr>") == 1 + 64


def test_of_many_ranks_those_that_wait_least_come_first() -> None:
    found = History(0.0)
    found.begin()
    for second in range(3):
        waits = [{"steps": second + 1, "waited": second * (0.9 - rank / 1000)} for rank in range(100)]
        found.add(sample(float(second), *waits))
    text = page(record(100), found, RunEnd(0, 2.0))
    rows = [int(rank) for rank in re.findall(r"<tr><td>(\d+)</td>", text)]
    assert rows == list(range(99, 99 - 64, -1))


def test_two_attempts_and_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SHORTEST", 0.0)
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


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def test_only_the_secret_opens_the_page() -> None:
    with serving(lambda: "the page") as address:
        assert address.startswith("http://127.0.0.1:")
        assert fetched(address) == "the page"
        base, _, token = address.partition("?token=")
        for wrong in (base, f"{base}?token=", f"{base}?token={token}x", f"{base}{token}", f"{base}?token=%ff"):
            with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                fetched(wrong)
            refused.value.close()
    with pytest.raises(urllib.error.URLError):
        fetched(address)


def test_the_page_follows_the_run_and_outlives_it(tmp_path: Path) -> None:
    run = PublishedRun(plan(), tmp_path)
    board = run.begin(0, range(2))
    run.started([os.getpid()] * 2)
    (record,) = published_runs(tmp_path)
    watched = WatchedRun(record)
    board.slot(0).step(1)
    board.slot(0).load(0, 0, 3, 8)
    board.script_output.log(1, {"loss": 0.5})
    cards = {name: Gpu(0, "GPU-0", "H200", 140 << 30, 1 << 30, 50) for name in (record.devices[0], "GPU 7")}
    watched.look(record, cards)
    text = watched.page()
    assert "train.py: runs</h1>" in text
    assert f"{record.devices[0]}</span></div></figcaption>" in text.split("<h2>Use of each GPU</h2>")[1]
    assert "GPU 7" not in text  # another run's
    assert '<meta http-equiv="refresh" content="1">' in text
    assert "<h2>loss</h2>" in text
    assert " · batch 3 of 8" in text

    run.failed("rank 1 was killed", "duoka: rank 1 ended by SIGKILL")
    run.begin(1, range(2))
    run.started([os.getpid()] * 2)
    (record,) = published_runs(tmp_path)
    watched.look(record)
    text = watched.page()
    assert "rank 1 was killed</summary><pre>duoka: rank 1 ended by SIGKILL</pre>" in text

    followed = FollowedRun(record, tmp_path)
    run.failed("rank 0 hung", "its stacks")
    run.ended(1)
    run.close()
    assert list(published_runs(tmp_path)) == []
    watched.end(followed.read())
    text = watched.page()
    assert "train.py: ended with exit code 1</h1>" in text
    assert "rank 0 hung</summary><pre>its stacks</pre>" in text
    assert "refresh" not in text
