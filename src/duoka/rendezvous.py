"""How workers reach the launcher's store, where they find each other; and how they part."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from duoka.environment import Place
from duoka.libc import names_from_files
from duoka.private.torch import all_groups, rendezvous_handlers


def tcp_store(host: str, port: int, **how: Any) -> TCPStore:
    """torch's store at this place, without a question to a name server whose answer nobody needs.

    torch asks for the names of all addresses, to show them: where no name server answers, that takes 6 s each time,
    and whoever has the store's server in its process is asked for those of all others (`names_from_files`).
    """
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    if len(addresses) != 1:  # torch tries all, or says that there is none
        return TCPStore(host, port, **how)
    with names_from_files():
        return TCPStore(str(addresses.pop()), port, **how)


def reach_store(place: Place, timeout: float) -> Store:
    """The part of the launcher's store that belongs to this attempt; it waits `timeout` seconds for a key."""
    store: Store
    if place.file is None:
        store = tcp_store(place.host, place.port, is_master=False, timeout=timedelta(seconds=timeout))
    else:
        store = FileStore(f"/proc/self/fd/{place.file}", place.world_size)
        store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(f"attempt{place.attempt}", store)


def empty_store_for_each_group(comes: Callable[[], None]) -> None:
    """Let each init_process_group of a script begin with keys of its own. `comes` is called in each.

    Several ranks share one store, and torch uses the same keys in it again and again: a rank that comes first
    to a second init_process_group finds addresses of the first one, and fails to connect to them.
    """
    for scheme in ("env", "tcp"):
        rendezvous_handlers[scheme] = _counting(rendezvous_handlers[scheme], comes)


def _counting(handler: Any, comes: Callable[[], None]) -> Any:
    numbers = itertools.count()

    def counting(url: str, **how: Any) -> Iterator[tuple[Store, int, int]]:
        comes()
        for store, rank, size in handler(url, **how):
            yield PrefixStore(f"group{next(numbers)}", store), rank, size

    return counting


def keep_destroyed_groups() -> None:
    """Let a gloo group that a script destroys live on, idle, until its process ends.

    It goes with the last that holds it, mostly a DistributedDataParallel at the end of main(). torch 2.13 then waits
    for gloo's threads while it holds Python's lock, for which one of those may wait: both wait for ever.
    """
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    destroy = c10d.destroy_process_group
    kept: list[Any] = []

    @wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        kept.extend(all_groups() if group in (None, c10d.GroupMember.WORLD) else [group])
        destroy(group)

    for module in (c10d, sys.modules["torch.distributed"]):
        module.destroy_process_group = destroy_and_keep  # type: ignore[attr-defined]
