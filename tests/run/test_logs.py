"""Every kind of log."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import duoka
from duoka.errors import OptionError
from duoka.run.logs import LOGS, Logs, check_logs
from tests.flows.flow import Flow
from tests.run.ranks import on_ranks


def written(words: list[str], *rows: dict[str, Any]) -> None:
    logs = Logs(check_logs(words))
    for step, row in enumerate(rows, 1):
        logs.write(step, row)
    logs.close()


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    written(["console"], {"loss": torch.tensor(0.123456), "right": 7, "of": "digits"})
    assert capsys.readouterr().out == "step 1: loss 0.1235, right 7, of digits\n"


def test_json_lines(tmp_path: Path) -> None:
    place = tmp_path / "new" / "train.jsonl"
    written([f"jsonl:{place}"], {"loss": np.float32(0.5)}, {"loss": float("nan"), "lr": torch.tensor([3])})
    written([f"jsonl:{place}"], {"loss": 0.25})
    rows = [json.loads(line) for line in place.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, None), (1, 0.25)]
    assert rows[1]["lr"] == 3


def test_csv_gets_wider(tmp_path: Path) -> None:
    place = tmp_path / "train.csv"
    written([f"csv:{place}"], {"loss": 0.5}, {"loss": 0.25, "accuracy": 0.9})
    written([f"csv:{place}"], {"note": 'a, "b"'}, {"loss": 0.1})
    rows = list(csv.DictReader(place.read_text().splitlines()))
    assert [row["loss"] for row in rows] == ["0.5", "0.25", "", "0.1"]
    assert [row["accuracy"] for row in rows] == ["", "0.9", "", ""]
    assert rows[2]["note"] == 'a, "b"'
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


@pytest.mark.parametrize("words", ["consol", "csv", ["console", "jsonl:"], "jsonl"])
def test_names_that_are_wrong(words: Any) -> None:
    with pytest.raises(OptionError, match=r"did you mean console|for example"):
        check_logs(words)


def test_every_kind_is_tested() -> None:
    assert set(LOGS) == {"console", "csv", "jsonl"}


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        batch = run.batch(torch.ones(4, 2))
        with pytest.raises(OptionError, match=r"x\.mean\(\)"):
            run.log(x=batch)
        with pytest.raises(OptionError, match="a number, a text"):
            run.log(x=[1, 2])
        run.log(1, mean=batch.mean(), count=len(batch))

    place = tmp_path / "log.csv"
    on_ranks(2, work, log=f"csv:{place}")
    assert place.read_text() == "step,mean,count\n1,1.0,4\n"


ENDS = """
import sys
import duoka

run = duoka.start(log=["console", "jsonl:out.jsonl"])
close = run._logs._logs[1].close if run.is_first else None
if run.is_first:
    run._logs._logs[1].close = lambda: (close(), open("closed", "w").write("yes"))
run.log(1, loss=0.5)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('no')", "raise KeyboardInterrupt", "run.close()"])
@pytest.mark.parametrize("workers", [0, 2])
def test_logs_are_closed_whatever_happens(flow: Flow, end: str, workers: int) -> None:
    script = flow.write("train.py", ENDS.replace("{end}", end))
    if workers:
        result = flow.run(["run", "-q", "--devices", f"cpu:{workers}", script])
    else:
        result = flow.python([script])
    assert "step 1: loss 0.5" in result.stdout
    assert (flow.folder / "closed").read_text() == "yes"
