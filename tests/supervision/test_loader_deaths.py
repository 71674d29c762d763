from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing import resource_sharer

import pytest

from duoka.supervision.loader_deaths import cause_of, hide_lost_rank_errors


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
