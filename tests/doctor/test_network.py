from __future__ import annotations

import socket
import threading
import time

import pytest

from duoka import libc
from duoka.doctor import network
from duoka.doctor.network import of_clock, of_name


@pytest.mark.parametrize(
    ("addresses", "level"),
    [(["10.0.0.7"], "ok"), (["127.0.1.1"], "advice"), (["::1"], "advice"), (["127.0.0.1", "10.0.0.7"], "ok")],
)
def test_a_name_must_lead_to_an_address(addresses: list[str], level: str) -> None:
    assert of_name("box", lambda name: addresses).level == level


def test_a_name_that_leads_nowhere_or_keeps_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    over = threading.Event()

    def silent(name: str) -> list[str]:
        over.wait(30)
        return []

    monkeypatch.setattr(network, "PATIENCE", 0.05)
    for resolve in (unknown, silent):
        assert "cannot be resolved" in of_name("box", resolve).what
    over.set()


def test_the_clock() -> None:
    now = time.time()
    assert of_clock(now, now - 10, True).level == "ok"
    assert of_clock(now, now - 10, None).level == "ok"
    assert of_clock(now, now - 10, False).level == "advice"
    assert of_clock(0, now, True).level == "fault"
    assert libc.clock_is_synchronised() in (True, False, None)
