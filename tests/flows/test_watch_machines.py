"""`duoka watch` and `--report` show the ranks of all machines of a run on machine 0."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duoka.watching.record import published_runs
from tests.flows.flow import Flow, Running
from tests.flows.test_machines import start
from tests.flows.test_watch import looks

UNEQUAL = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(0.1 * int(os.environ["HERE"]))
"""
SLOWEST = re.compile(r"waiting for others \d+%: rank 1 on machine 1 \(.*\) is the slowest in .*, asleep for")


def named(look: dict[str, Any]) -> bool:
    return any(map(SLOWEST.match, look["findings"]))


def published(run: Running) -> bool:
    return any(record.pid == run.pid for record in published_runs())


def seen(watching: Running, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first look for which a condition holds."""
    while True:
        for look in looks(watching.stdout()):
            assert look["event"] == "look", look
            if condition(look):
                return look
        time.sleep(0.05)


def test_machine_0_shows_the_ranks_of_all(flow: Flow, tmp_path: Path) -> None:
    """Rank 1, on machine 1, is the slowest; then its command is stopped, goes on, and is killed."""
    script, report = flow.write("train.py", UNEQUAL), tmp_path / "report.html"
    first, second = start(flow, script, options=("--report", str(report)))
    while not published(first):
        time.sleep(0.05)
    watching = flow.start(["watch", "--json", str(first.pid)])
    look = seen(watching, named)
    places = [(one["rank"], one["machine"].split(" (")[0]) for one in look["ranks"]]
    assert places == [(0, "machine 0"), (1, "machine 1")]
    assert look["ranks"][0]["parts"]["waiting"] > look["ranks"][1]["parts"]["waiting"]
    assert look["ranks"][1]["parts"]["rest"] > 0.2
    assert look["ranks"][1]["memory"] > 1 << 20

    second.send(signal.SIGSTOP)  # its workers go on
    look = seen(watching, lambda look: any("no sample received for" in text for text in look["findings"]))
    assert look["ranks"][1]["silent"] > 3
    assert look["findings"][0].startswith("rank 1 on machine 1 (")
    second.send(signal.SIGCONT)
    seen(watching, lambda late: late["seconds"] > look["seconds"] and late["ranks"][1]["silent"] < 3)

    second.send(signal.SIGKILL)
    second.wait()
    assert first.wait().returncode == 1
    end = looks(watching.wait().ok().stdout)[-1]
    assert re.fullmatch(r"machine 1 \(.*\) is gone: its command has ended", end["faults"][0])
    text = report.read_text()
    assert "train.py: ended with exit code 1" in text
    assert any(map(SLOWEST.match, re.findall("<li>(.*?)</li>", text)))
    assert end["faults"][0] in text
