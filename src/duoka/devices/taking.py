"""Taking devices in one step for all processes of a user: looking, choosing, keeping others away, queueing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from duoka.devices import Device, allowed_gpus, choose, inventory
from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory
from duoka.devices.locks import Held, Locks, Waiting
from duoka.devices.pick import fit_for, taken, the_best
from duoka.devices.spec import Request, parse
from duoka.devices.waiting import until_free
from duoka.errors import AskedError, DeviceError, DevicesBusy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, and by whom. visible: CUDA_VISIBLE_DEVICES as it is set, or None."""

    request: Request
    visible: str | None
    command: str


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """What was decided, and the locks of its cards. notes: who else uses them, or why they cannot be locked."""

    decided: T
    held: Held
    notes: tuple[str, ...] = ()


def take(
    asked: Asked,
    decide: Callable[[Inventory], T],
    devices: Callable[[T], Sequence[Device]],
    wait: float,
    say: Callable[[str], None],
) -> Taken[T]:
    """Decide by what this machine has, and take the cards before another run of duoka can.

    Args:
        asked: by this the others in the queue know what is waited for.
        decide: given what the machine has and who has it. Called again after each look.
        devices: of what was decided.
        wait: seconds to queue until they are free; 0 does not wait.
        say: told for whom one waits, whenever that changes.

    Raises:
        DevicesBusy: others use them now, and the time to wait is over.
        DeviceError: cards are to be picked where locks cannot be kept; and what `decide` raises.
    """
    place: int | None = None  # in the queue

    def look() -> Taken[T]:
        nonlocal place
        seen = inventory.read()
        with Locks() as locks:
            known = marked(seen, locks, place)
            try:
                decided = decide(known)
                names = [device.uuid for device in devices(decided) if device.uuid]
                if wait > 0:
                    _must_be_free([gpu for gpu in known.units() if gpu.uuid in names], asked.request)
            except DevicesBusy:
                if wait > 0 and place is None and not locks.problem:
                    place, ticket = locks.join(str(asked.request), asked.visible, asked.command)
                    waiting.enter_context(ticket)
                raise
            if names and asked.request.pick and locks.problem:
                raise DeviceError(f"--devices {asked.request}: {locks.problem}; name cards by their numbers instead")
            held, others = locks.hold(names, asked.command)
        also = [
            f"{device} is also used by {others[device.uuid].command} (pid {others[device.uuid].pid})"
            for device in devices(decided)
            if device.uuid in others
        ]
        return Taken(decided, held, (*also, *([locks.problem] if names and locks.problem else [])))

    with ExitStack() as waiting:
        return until_free(look, wait, say)


def marked(seen: Inventory, locks: Locks, place: int | None = None) -> Inventory:
    """The same with each card's holder, and with who waits for it: of those who came before `place` in the queue."""

    def held(gpu: Gpu) -> Gpu:
        return replace(gpu, holder=locks.holder(gpu.uuid), parts=tuple(map(held, gpu.parts)))

    known = replace(seen, gpus=tuple(map(held, seen.gpus)))
    for waiting in locks.queue():
        if place is None or waiting.number < place:
            known = _kept_for(waiting, known)
    return known


def _kept_for(waiting: Waiting, known: Inventory) -> Inventory:
    """Mark what somebody who waits would take: as many as are wanted of those that are free, and not one more."""
    names = {gpu.uuid for gpu in _wanted(waiting, known)}

    def kept(gpu: Gpu) -> Gpu:
        awaited = waiting.holder if gpu.uuid in names else gpu.awaited
        return replace(gpu, awaited=awaited, parts=tuple(map(kept, gpu.parts)))

    return replace(known, gpus=tuple(map(kept, known.gpus)))


def _wanted(waiting: Waiting, known: Inventory) -> list[Gpu]:
    try:
        request = parse(waiting.request)
        if not request.pick:
            named = {device.uuid for device in choose(request, known, waiting.visible).devices}
            return [gpu for gpu in known.units() if gpu.uuid in named and not taken(gpu, request)]
        allowed, _ = allowed_gpus(known.gpus, waiting.visible)
        may = {gpu.uuid for card in allowed for gpu in (card, *card.parts)}
    except AskedError:  # of another version of duoka, or its cards are gone: it will find that itself
        return []
    able = fit_for(request, [gpu for gpu in known.units() if gpu.uuid in may and not gpu.problem])
    if request.count is None or len(able) < request.count:  # it waits in vain
        return []
    return the_best(gpu for gpu in able if not taken(gpu, request))[: request.count]


def _must_be_free(gpus: Sequence[Gpu], request: Request) -> None:
    """Whoever waits wants cards to be free, also those that were named."""
    users = "; ".join(f"GPU {gpu.number}: {why}" for gpu in gpus if (why := taken(gpu, request)))
    if users:
        raise DevicesBusy(f"--devices {request}: {users}", users)
