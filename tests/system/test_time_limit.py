from __future__ import annotations

import threading

import pytest

from duoka.system.time_limit import within


def test_an_answer_an_error_and_none() -> None:
    over = threading.Event()
    assert within(20, lambda: 3) == 3
    assert within(20, lambda: None) is None
    with pytest.raises(KeyError):
        within(20, lambda: {}["x"])
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: over.wait(30))
    over.set()
