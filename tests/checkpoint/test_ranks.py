"""Checkpoints of several ranks: real processes, real communication."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import duoka
from duoka.checkpoint.checkpoint import AGAIN, Preempted
from duoka.checkpoint.ranks import on_first, together
from duoka.collectives.base import OneRank
from duoka.errors import CheckpointError
from tests.checkpoint.runs import filled, outcome, train
from tests.view.processes import Raised, all_well, forked, in_processes


def alone(work: Callable[[], Any]) -> Any:
    """Compute the reference in one process, with as many threads as a rank has."""
    return all_well(forked(1, lambda rank: work()))[0]


def test_any_number_of_ranks_goes_on_from_any_other(tmp_path: Path) -> None:
    whole = alone(lambda: outcome(train(tmp_path / "whole")))

    def begin(ranks: Any) -> Any:
        return outcome(train(tmp_path / "run", epochs=1, ranks=ranks))

    def go_on(ranks: Any) -> Any:
        return outcome(train(tmp_path / "run", epochs=2, ranks=ranks))

    first = all_well(in_processes(2, begin, nearby=True))
    assert first[0] == first[1]
    second = all_well(in_processes(3, go_on, nearby=False))
    assert second == [second[0]] * 3
    assert alone(lambda: outcome(train(tmp_path / "run"))) == whole


def test_all_ranks_save_at_the_step_at_which_one_is_asked_to_end(tmp_path: Path) -> None:
    def work(ranks: Any) -> Any:
        original = duoka.Checkpoint.step

        def step(self: duoka.Checkpoint) -> None:
            if self.step_number == 5 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self)

        duoka.Checkpoint.step = step  # type: ignore[method-assign]
        try:
            train(tmp_path / "run", ranks=ranks)
        except Preempted as asked:
            return asked.code

    assert all_well(in_processes(2, work, nearby=True)) == [AGAIN, AGAIN]
    steps = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert "step-00000006" <= steps[-1] <= "step-00000012"
    assert alone(lambda: outcome(train(tmp_path / "run"))) == alone(lambda: outcome(train(tmp_path / "whole")))


def test_one_rank_that_cannot_save_stops_all(tmp_path: Path) -> None:
    class Sick:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, int]:
            if self.rank == 1:
                raise RuntimeError("out of luck")
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    def work(ranks: Any) -> None:
        duoka.Checkpoint(tmp_path / "run", {"sick": Sick(ranks.rank)}, ranks=ranks).save()

    first, second, third = in_processes(3, work, nearby=True)
    assert second == Raised("RuntimeError", "out of luck")
    assert first == third == Raised("CheckpointError", "saving failed on rank 1: RuntimeError('out of luck')")
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith("step")] == []


def test_an_error_in_the_background_reaches_every_rank(tmp_path: Path) -> None:
    def work(ranks: Any) -> None:
        saved = duoka.Checkpoint(tmp_path / "run", {"model": filled(1)}, ranks=ranks)
        if ranks.rank == 0:
            os.fsync = lambda fd: os.close(-1)
        saved.save()
        saved.wait()

    found = in_processes(2, work, nearby=True)
    assert {one.kind for one in found} == {"CheckpointError"}
    assert "could not be written" in found[1].text
    assert "could not be written" in found[0].text


def test_a_second_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    with duoka.Checkpoint(tmp_path, {"model": filled(1)}) as saved:
        saved.save()

        def work(ranks: Any) -> None:
            duoka.Checkpoint(tmp_path, {"model": filled(1)}, ranks=ranks).restore()

        assert [one.kind for one in in_processes(2, work, nearby=True)] == ["CheckpointBusy"] * 2


def test_weights_are_written_by_rank_0(tmp_path: Path) -> None:
    def work(ranks: Any) -> None:
        duoka.save_weights(filled(ranks.rank), tmp_path / "net.safetensors", ranks=ranks)

    all_well(in_processes(2, work, nearby=True))
    model = filled(5)
    duoka.load_weights(model, tmp_path / "net.safetensors")
    assert torch.equal(model.bias, torch.zeros(2))


def test_one_rank() -> None:
    ranks = OneRank()
    assert on_first(ranks, lambda: 3) == 3
    assert together(ranks, lambda: 4, "it", CheckpointError) == 4
    with pytest.raises(ZeroDivisionError):
        on_first(ranks, lambda: 1 // 0)
