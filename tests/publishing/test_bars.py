from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import rich.progress
from rich.console import Console

from duoka.publishing import bars
from duoka.publishing.publisher import Publisher
from tests.publishing.made import publisher


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    monkeypatch.setattr(bars, "EVERY", 0.0)
    return publisher()


def shown(ours: Publisher) -> list[tuple[str, float, float]]:
    return [(bar["name"], bar["done"], bar["total"]) for bar in ours.board.script_output.loops().get("bars", [])]


def test_tasks_of_rich(ours: Publisher) -> None:
    class Progress(rich.progress.Progress):
        """A class of its own, as the observed methods stay replaced."""

        advance = rich.progress.Progress.advance
        update = rich.progress.Progress.update
        stop = rich.progress.Progress.stop

    bars.install_rich(ours, SimpleNamespace(Progress=Progress))
    with Progress(console=Console(file=io.StringIO())) as progress:
        task, endless = progress.add_task("train:", total=10), progress.add_task("waiting", total=None)
        progress.advance(task, 4)
        progress.advance(endless, 1)
        assert shown(ours) == [("train", 4.0, 10.0)]
        assert ours.board.script_output.loops()["bars"][0]["rate"] > 0
        progress.update(task, completed=10)
        assert shown(ours) == []


def test_bars_of_tqdm(ours: Publisher) -> None:
    tqdm = pytest.importorskip("tqdm.std")

    class Bar(tqdm.tqdm):  # type: ignore[misc, name-defined]
        """A class of its own, as the observed methods stay replaced."""

        def refresh(self, *args: Any, **how: Any) -> Any:
            return super().refresh(*args, **how)

        def close(self) -> None:
            super().close()

    bars.install_tqdm(ours, SimpleNamespace(tqdm=Bar))
    outer = Bar(total=3, desc="epochs: ", file=io.StringIO(), mininterval=0, initial=1)
    inner = Bar(total=20, desc="batches", file=io.StringIO(), mininterval=0)
    inner.update(5)
    assert shown(ours) == [("epochs", 1, 3), ("batches", 5, 20)]
    inner.close()
    assert shown(ours) == [("epochs", 1, 3)]
    outer.update(1)
    (bar,) = ours.board.script_output.loops()["bars"]
    assert bar["rate"] > 0  # of what it did itself: one of three was done at its start
    outer.close()
    assert shown(ours) == []
