"""Allocate devices in one step for all processes of a user: read the inventory, choose, lock, queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from duoka.errors import AskedError, DeviceError, DevicesBusy
from duoka.hardware import inventory
from duoka.hardware.choice import allowed_gpus, by_preference, choose, large_enough, why_unavailable
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory, units
from duoka.hardware.locks import HeldLocks, Locks, QueueEntry
from duoka.hardware.spec import Request, parse

T = TypeVar("T")

STEP = 2.0  # seconds between two attempts


@dataclass(frozen=True, slots=True)
class Allocation(Generic[T]):
    """A decision, and the locks on its GPUs. notes: other users of them, or why they cannot be locked."""

    decided: T
    locks: HeldLocks
    notes: tuple[str, ...] = ()


def allocate(
    request: Request,
    command: str,  # the one that asks, shown to others in the queue
    decide: Callable[[Inventory], T],  # called with the inventory, including holders; again after each wait
    devices: Callable[[T], Sequence[Device]],  # returns the devices of a decision
    wait: float,  # seconds to queue until they are free; 0 does not wait
    say: Callable[[str], None],  # called with the users of the devices, whenever these change
) -> Allocation[T]:
    """Decide from the inventory of this machine, and lock the GPUs before another run can.

    Raises DevicesBusy if others use the devices, and the time to wait is over; DeviceError if GPUs are to be picked
    but locks cannot be used.
    """
    queue_number: int | None = None

    def look() -> Allocation[T]:
        nonlocal queue_number
        seen = inventory.read(request.type)  # outside the mutex: a slow driver blocks no other process
        with Locks() as locks:
            known = with_holders(seen, locks, queue_number)
            try:
                decided = decide(known)
                names = [*dict.fromkeys(device.uuid for device in devices(decided) if device.uuid)]
                # Without --wait a GPU named by number is used although others use it; a queued process waits for it.
                chosen = [gpu for gpu in units(known.gpus) if gpu.uuid in names and wait > 0]
                whys = {gpu.number: why_unavailable(gpu, request) for gpu in chosen}
                if users := "; ".join(f"GPU {number}: {why}" for number, why in whys.items() if why):
                    raise DevicesBusy(f"--devices {request}: {users}", users)
            except DevicesBusy:
                # Before the mutex is released, so that nobody who comes later takes what is waited for.
                if wait > 0 and queue_number is None and not locks.problem:
                    queue_number, ticket = locks.join(str(request), seen.visible, command)
                    waiting.enter_context(ticket)
                raise
            if names and request.pick and locks.problem:
                raise DeviceError(f"--devices {request}: {locks.problem}; give GPU numbers instead")
            held, others = locks.hold(names, command)
        also = [
            f"{device} is also used by {others[device.uuid].command} (pid {others[device.uuid].pid})"
            for device in devices(decided)
            if device.uuid in others
        ]
        return Allocation(decided, held, (*also, *([locks.problem] if names and locks.problem else [])))

    with ExitStack() as waiting:
        return until_free(look, wait, say)


def read_with_holders(kind: str = "auto") -> Inventory:
    """Read the inventory, and set the holders of GPUs. kind: as for `inventory.read`."""
    seen = inventory.read(kind)  # outside the mutex, as in `allocate`
    with Locks() as locks:
        return with_holders(seen, locks)


def with_holders(seen: Inventory, locks: Locks, queue_number: int | None = None) -> Inventory:
    """Set each GPU's holder, and the process for which it is reserved: one in the queue before `queue_number`."""

    def held(gpu: Gpu) -> Gpu:
        return replace(gpu, holder=locks.holder(gpu.uuid), parts=tuple(map(held, gpu.parts)))

    def kept(gpu: Gpu) -> Gpu:
        awaited = waiting.holder if gpu.uuid in names else gpu.awaited
        return replace(gpu, awaited=awaited, parts=tuple(map(kept, gpu.parts)))

    known = replace(seen, gpus=tuple(map(held, seen.gpus)))
    # In order: what is reserved for the first in the queue is not free for the second.
    for waiting in locks.queue():
        if queue_number is None or waiting.number < queue_number:
            names = {gpu.uuid for gpu in _would_get(waiting, known)}
            known = replace(known, gpus=tuple(map(kept, known.gpus)))
    return known


def _would_get(waiting: QueueEntry, known: Inventory) -> list[Gpu]:
    """Return the GPUs that a queued process would get: as many of the free ones as it requests."""
    try:
        request, known = parse(waiting.request), replace(known, visible=waiting.visible)
        if not request.pick:
            named = {device.uuid for device in choose(request, known).devices}
            return [gpu for gpu in units(known.gpus) if gpu.uuid in named and not why_unavailable(gpu, request)]
        allowed, _ = allowed_gpus(known)
        may = {gpu.uuid for card in allowed for gpu in (card, *card.parts)}
    except AskedError:  # of another version of duoka, or its GPUs no longer exist: it will fail by itself
        return []
    able = large_enough(request, [gpu for gpu in units(known.gpus) if gpu.uuid in may and not gpu.problem])
    if request.count is None or len(able) < request.count:  # it cannot succeed
        return []
    return by_preference(gpu for gpu in able if not why_unavailable(gpu, request))[: request.count]


def until_free(take: Callable[[], T], limit: float, say: Callable[[str], None]) -> T:
    """Call `take` until it does not raise DevicesBusy, and return its result; raise it after `limit` seconds.

    say: called with the users of the devices, whenever these change.
    """
    deadline = time.monotonic() + limit
    users = ""
    while True:
        try:
            return take()
        except DevicesBusy as busy:
            if limit > 0 and busy.users != users:
                users = busy.users
                say(f"waiting for devices: {users}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        time.sleep(min(STEP, left))
