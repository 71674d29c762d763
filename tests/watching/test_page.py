from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from duoka.devices.gpu import Gpu
from duoka.supervision.rings import LoggedValue
from duoka.watching.history import MOST, SHORTEST, History, RunEvent
from duoka.watching.page import RunEnd, page
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
