from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from duoka.network.rendezvous import empty_store_for_each_group, reach_store
from duoka.system.environment import RankInfo

HANDLERS: dict[str, Any] = vars(sys.modules["torch.distributed.rendezvous"])["_rendezvous_handlers"]


@pytest.fixture
def server() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


PLACE = RankInfo(rank=0, world_size=2, attempt=0, port=0, run_id="id")


def place(server: Any, attempt: int) -> RankInfo:
    return RankInfo(rank=0, world_size=2, attempt=attempt, port=server.port, run_id="id")


def test_ranks_of_one_attempt_share_a_store_and_attempts_do_not(server: Any) -> None:
    first, second = (reach_store(place(server, attempt=0), timeout=20) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    later = reach_store(place(server, attempt=1), timeout=20)
    assert not later.check(["key"])


def test_ranks_of_one_machine_share_a_file_without_a_name() -> None:
    file = os.memfd_create("store")
    places = [replace(PLACE, rank=rank, file=file) for rank in range(2)]
    first, second = (reach_store(one, timeout=20) for one in places)
    first.set("key", "value")
    assert second.get("key") == b"value"
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        reach_store(places[0], timeout=0.2).get("never")
    assert os.stat(f"/proc/self/fd/{file}").st_nlink == 0  # no other process has a path to it
    os.close(file)


def test_a_key_is_waited_for_as_long_as_was_said(server: Any) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imeout"):
        reach_store(place(server, attempt=0), timeout=0.2).get("never")


@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_each_group_of_a_script_begins_with_an_empty_store(
    monkeypatch: pytest.MonkeyPatch, server: Any, scheme: str
) -> None:
    def to_the_server(url: str, **how: Any) -> Any:
        yield server, 0, 2

    for name in ("env", "tcp"):
        monkeypatch.setitem(HANDLERS, name, to_the_server)
    comings: list[int] = []
    empty_store_for_each_group(lambda: comings.append(len(comings)))
    stores = []
    for number in range(3):
        store, rank, size = next(HANDLERS[scheme](f"{scheme}://"))
        assert (rank, size) == (0, 2)
        store.set("key", str(number))
        stores.append(store)
    assert [store.get("key") for store in stores] == [b"0", b"1", b"2"]
    assert comings == [0, 1, 2]
