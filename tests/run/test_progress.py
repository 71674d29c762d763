from __future__ import annotations

import io
import re

import pytest
import torch

from duoka.run import progress
from duoka.run.progress import Progress

BATCHES = [(torch.ones(8, 2), torch.ones(8)), (torch.ones(8, 2), torch.ones(8)), (torch.ones(3, 2), torch.ones(3))]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def gone_through(stream: io.StringIO, shown: bool = True) -> list[int]:
    bar = Progress(BATCHES, "epoch 1", shown, stream)
    found = []
    for x, _ in bar:
        found.append(len(x))
        bar.show(loss=torch.tensor(0.25), right=7)
    assert len(bar) == 3
    return found


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", -1.0)
    stream = io.StringIO()
    assert gone_through(stream) == [8, 8, 3]
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1: batch 1 of 3, \S+ samples/s, 0:00 left, loss 0.25, right 7", lines[0])
    assert re.fullmatch(r"epoch 1: batch 3 of 3, \S+ samples/s, loss 0.25, right 7", lines[-1])


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    assert gone_through(stream) == [8, 8, 3]
    text = stream.getvalue()
    assert "epoch 1" in text
    assert "3/3" in text
    assert "loss 0.25" in text


def test_other_ranks_show_nothing() -> None:
    stream = io.StringIO()
    assert gone_through(stream, shown=False) == [8, 8, 3]
    assert stream.getvalue() == ""


def test_an_error_ends_the_bar() -> None:
    stream = io.StringIO()
    batches = iter(Progress(iter(BATCHES), "train", True, stream))
    next(batches)
    with pytest.raises(ZeroDivisionError):
        batches.throw(ZeroDivisionError)  # type: ignore[attr-defined]
    assert stream.getvalue().startswith("train: batch 0")
