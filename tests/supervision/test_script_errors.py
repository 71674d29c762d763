from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from multiprocessing import resource_sharer

import pytest

from duoka.supervision.script_errors import cause_of, hide_lost_rank_errors
from tests.flows.flow import Flow


@pytest.fixture
def forgiving() -> Iterator[None]:
    before = resource_sharer.sys  # type: ignore[attr-defined]
    hide_lost_rank_errors()
    yield
    resource_sharer.sys = before  # type: ignore[attr-defined]


@pytest.mark.usefixtures("forgiving")
def test_a_lost_rank_is_not_shown_and_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    for error in (ConnectionResetError(), EOFError(), KeyError()):
        try:
            raise error
        except Exception:
            resource_sharer.sys.excepthook(*resource_sharer.sys.exc_info())  # type: ignore[attr-defined]
    assert [type(error) for error in shown] == [KeyError]


def test_where_no_loader_had_a_worker_a_broken_connection_is_told_at_once() -> None:
    error = ConnectionResetError()
    assert cause_of(error) is error


def test_what_ended_a_worker_is_told_though_the_script_swallowed_it(flow: Flow) -> None:
    source = """
        import os, signal, time
        import torch
        from torch.utils.data import DataLoader, _utils

        _utils.MP_STATUS_CHECK_INTERVAL = torch.utils.data.dataloader.MP_STATUS_CHECK_INTERVAL = 0.1

        class Data(torch.utils.data.Dataset):
            def __len__(self): return 9
            def __getitem__(self, index):
                if index:
                    time.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.ones(1)

        batches = iter(DataLoader(Data(), num_workers=1))
        next(batches)
        try:
            time.sleep(20)  # in which torch's handler raises its error
        except RuntimeError:
            pass
        next(batches)
        """
    result = flow.run(["run", "-q", "--devices", "cpu:2", flow.write("script.py", source)])
    assert result.returncode == 1
    assert re.search(r"RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: Killed", result.stderr)
    assert "exited unexpectedly" in result.stderr
