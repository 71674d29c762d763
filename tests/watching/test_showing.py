from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from duoka.watching.showing import as_data, as_line, as_tables
from duoka.watching.watcher import RunState, RunWatcher
from tests.watching.made import record, sample


def state(**given: object) -> RunState:
    watcher = RunWatcher(record(**given))
    watcher.add(sample(0.0, {}, {}))
    ranks = {"steps": 20, "waited": 5.0, "ran": 5.0, "samples": 640, "memory": 3 << 29}
    watcher.add(sample(10.0, ranks, ranks | {"waited": 0.0, "ran": 10.0}))
    return watcher.state({})


def drawn(*states: RunState, width: int = 120) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(as_tables(states, console.width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_table() -> None:
    title, head, first, second, note, *_ = drawn(state())
    assert title.startswith("train.py (pid 100)")
    assert "step 20  2 steps/s (500 ms each)  64 samples/s  slowest: rank 1, in 100% of readings" in title
    assert head.split() == ["rank", "device", "computes", "waits", "loads", "queues", "sleeps", "cores", "memory"]  # fmt: skip  # noqa: E501
    assert first.split() == ["0", "CPU", "█" * 12, "50%", "50%", "0%", "0%", "0%", "0.0", "1.50", "GiB"]
    assert second.split() == ["1", "CPU", "█" * 12, "100%", "0%", "0%", "0%", "0%", "0.0", "1.50", "GiB"]
    assert note.strip().startswith("waiting for others 25%: rank 1 is the slowest")


def test_uneven_shares_of_a_batch() -> None:
    watcher = RunWatcher(record())
    watcher.add(sample(0.0, {"rows": 48, "seconds_of_row": 0.0025}, {"rows": 16}))
    _, head, first, second, *_ = drawn(watcher.state({}))
    assert head.split()[-5:] == ["rows", "a", "row", "cores", "memory"]
    assert (first.split()[2:5], second.split()[2:4]) == (["48", "2.5", "ms"], ["16", "0.00"])
    data = as_data(watcher.state({}))["ranks"]
    assert [(one["rows"], one["seconds_of_row"]) for one in data] == [(48, 0.0025), (16, None)]


def test_in_a_narrow_terminal_columns_are_left_out_whole() -> None:
    names = {}
    for width in (120, 80, 60, 40, 20):
        lines = drawn(state(), width=width)
        assert all(len(line) <= width for line in lines)
        assert "\u2026" not in "".join(lines[:6]) or width == 20
        head = next(line for line in lines if line.split()[:1] == ["rank"] or line.startswith("rank"))
        names[width] = head.split()
    assert names[80] == ["rank", "device", "computes", "waits", "loads", "queues", "sleeps", "cores", "memory"]
    assert names[60] == ["rank", "computes", "waits", "loads", "queues", "sleeps", "memory"]
    assert names[40] == ["rank", "computes", "waits", "loads", "queues"]


def test_of_many_ranks_the_worst_are_shown() -> None:
    watcher = RunWatcher(record(100))
    watcher.add(sample(0.0, *[{}] * 100))
    waits = [{"waited": 5.0, "steps": 1, "ran": 5.0}] * 100
    waits[70] = {"waited": 0.0, "steps": 1, "ran": 10.0}
    waits[80] = {"waited": 9.0, "received": 2.0}  # of another machine, of which nothing is heard
    watcher.add(sample(10.0, *waits))
    lines = drawn(watcher.state({}))
    rows = [line.split()[0] for line in lines[2:18]]
    assert rows == ["80", "70", *map(str, range(14))]
    assert "  the 16 of 100 ranks that are worst off, the worst first; --json has all" in lines
    waits[90] = waits[90] | {"waited": 9.0}
    stuck = [one | {"inside": "all_reduce", "since": 9.0} if rank != 90 else one for rank, one in enumerate(waits)]
    watcher.add(sample(11.0, *stuck))
    rows = [line.split()[0] for line in drawn(watcher.state({}))[2:18]]
    assert rows[:4] == ["80", "90", "70", "0"]  # rank 90 did not come


def test_the_ranks_of_several_machines() -> None:
    places = {"machines": ("machine 0 (a)", "machine 1 (b)"), "workers": (1, 1)}
    title, head, first, second, *_ = drawn(state(pids=(101,), **places), width=160)
    assert "slowest: rank 1 on machine 1 (b), in 100% of readings" in title
    assert head.split()[:3] == ["rank", "machine", "device"]
    assert (first.split()[:4], second.split()[:4]) == (["0", "0", "(a)", "CPU"], ["1", "1", "(b)", "CPU"])
    (title, *_) = drawn(state(first=1, machine=1, pids=(101,), **places), width=300)
    assert "only rank 1 on machine 1 (b); the command of rank 0 on machine 0 (a) shows all" in title
    title, head, *_ = drawn(state(pids=(101,), workers=(1, 1)), width=160)  # an engine's commands on one machine
    assert "slowest: rank 1, in 100%" in title
    assert head.split()[:2] == ["rank", "device"]


def test_of_many_values_the_first_are_shown() -> None:
    seen = replace(state(), values={f"v{number}": 1.0 for number in range(20)})
    assert any("v15 1  and 4 more values; --json has them" in line for line in drawn(seen, width=300))
    assert len(as_data(seen)["values"]) == 20


def test_waits_that_are_not_seen_have_no_column() -> None:
    assert "waits" not in drawn(state(sees_waits=False))[1]


def test_names_are_printed_without_control_characters() -> None:
    assert "\x1b" not in "".join(drawn(state(name="a\x1b[31m")))


def test_data() -> None:
    data = json.loads(as_line(as_data(state())))
    assert (data["event"], data["pid"], data["steps"], data["steps_per_second"]) == ("look", 100, 20, 2.0)
    assert data["slowest"] == {"rank": 1, "often": 1.0}
    assert data["ranks"][0]["parts"] == {"waiting": 0.5, "loading": 0, "computing": 0.5, "queued": 0, "rest": 0}
    assert as_data(state(sees_waits=False))["ranks"][0]["parts"]["waiting"] is None
