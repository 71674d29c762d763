from __future__ import annotations

import socket
import threading
import time

import pytest

from duoka.doctor import host
from duoka.doctor.host import check_clock, check_host_name, check_interface, check_localhost
from duoka.system import libc


@pytest.mark.parametrize(
    ("addresses", "level"),
    [(["10.0.0.7"], "ok"), (["127.0.1.1"], "advice"), (["::1"], "advice"), (["127.0.0.1", "10.0.0.7"], "ok")],
)
def test_a_name_must_lead_to_an_address(addresses: list[str], level: str) -> None:
    assert check_host_name("box", lambda name: addresses).level == level


def test_a_name_that_leads_nowhere_or_keeps_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    over = threading.Event()

    def silent(name: str) -> list[str]:
        over.wait(30)
        return []

    monkeypatch.setattr(host, "RESOLVE_LIMIT", 0.05)
    for resolve in (unknown, silent):
        assert "cannot be resolved" in check_host_name("box", resolve).what
    over.set()


@pytest.mark.parametrize(
    ("addresses", "level"), [(["127.0.0.1", "::1"], "ok"), (["10.0.0.7"], "fault"), ([], "fault")]
)
def test_localhost_must_be_here(addresses: list[str], level: str) -> None:
    assert check_localhost(lambda name: addresses).level == level


@pytest.mark.parametrize(
    ("names", "well"),
    [
        ("eth0", True),
        ("eth", True),
        ("ib0,eth0", True),
        ("=eth0", True),
        ("^docker", True),
        ("ib0", False),
    ],
)
def test_a_network_device_that_is_not_there(names: str, well: bool) -> None:
    findings = list(check_interface("NCCL_SOCKET_IFNAME", names, ["lo", "eth0"]))
    assert [finding.level for finding in findings] == ["fault"] * (not well)


def test_the_clock() -> None:
    now = time.time()
    assert check_clock(now, now - 10, True).level == "ok"
    assert check_clock(now, now - 10, None).level == "ok"
    assert check_clock(now, now - 10, False).level == "advice"
    assert check_clock(0, now, True).level == "fault"
    assert libc.clock_is_synchronised() in (True, False, None)
