"""torch's stores, in which ranks find each other's addresses."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from duoka.private.torch import all_groups, rendezvous_handlers
from duoka.system.environment import RankInfo
from duoka.system.libc import names_from_files


def tcp_store(host: str, port: int, **how: Any) -> TCPStore:
    """Return torch's store at this address, without reverse DNS look-ups.

    torch looks up the names of all addresses for its messages: if no name server answers, that takes 6 s each, and
    the process with the store's server does it for each client (`names_from_files`).
    """
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        addresses = set()
    if len(addresses) != 1:  # torch tries all, or raises if there is none
        return TCPStore(host, port, **how)
    with names_from_files():
        return TCPStore(str(addresses.pop()), port, **how)


def reach_store(info: RankInfo, timeout: float, holder: int | None = None) -> Store:
    """Return the launcher's store with a prefix for this attempt. timeout: seconds to wait for a key.

    holder: the worker process that has the store's file open, for a process that has not inherited it.
    """
    store: Store
    if info.file is None:
        store = tcp_store(info.host, info.port, is_master=False, timeout=timedelta(seconds=timeout))
    else:
        store = FileStore(f"/proc/{holder or 'self'}/fd/{info.file}", info.world_size)
        store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(f"attempt{info.attempt}", store)


def empty_store_for_each_group(comes: Callable[[], None]) -> None:
    """Give each init_process_group of a script its own prefix in the store. comes: called at each of these calls.

    torch uses the same keys for each group: a rank that starts a second init_process_group first would read addresses
    of the first group, and fail to connect to them.
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
    """Keep gloo groups that a script destroys until its process ends.

    A group is freed with its last reference, often a DistributedDataParallel at the end of main(). torch 2.13 then
    joins gloo's threads while it holds the interpreter's lock, and deadlocks if one of those waits for the lock.
    """
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    destroy = c10d.destroy_process_group
    kept: list[Any] = []

    @wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        kept.extend(all_groups() if group in (None, c10d.GroupMember.WORLD) else [group])  # afterwards there are none
        destroy(group)

    for module in (c10d, sys.modules["torch.distributed"]):
        module.destroy_process_group = destroy_and_keep  # type: ignore[attr-defined]
