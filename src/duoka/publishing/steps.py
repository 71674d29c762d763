"""Steps of optimizers, and batches that are taken from loaders."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher

MOST_ITERATORS = 64  # that are remembered
NOTHING = 0, 0


def install(publisher: Publisher) -> None:
    """Observe the steps and loaders of this process; torch is imported."""
    _count_steps(publisher)
    _time_loaders(publisher)


def _count_steps(publisher: Publisher) -> None:
    """Record the number of steps: those of the optimizer that has made most."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.hooks import RemovableHandle

    from duoka.private.light import not_compiled

    slot = publisher.slot
    steps: dict[int, int] = {}  # by the id of an existing optimizer: a weak dictionary would take a microsecond
    living: dict[int, weakref.ref[Any]] = {}
    most = 0

    def forget(number: int) -> None:
        steps.pop(number, None)
        living.pop(number, None)

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        name = id(optimizer)
        if name not in steps:
            steps[name] = 0
            living[name] = weakref.ref(optimizer, lambda _: forget(name))
        number = steps[name] = steps[name] + 1
        if number > most and publisher.active:
            most = number
            slot.step(number)

    before, RemovableHandle.next_id = RemovableHandle.next_id, -1  # a script may print the ids of its own hooks
    register_optimizer_step_post_hook(not_compiled(count))
    RemovableHandle.next_id = before


def _time_loaders(publisher: Publisher) -> None:
    """Record how long the main thread waits for batches, their samples, and where it is in the loader."""
    from duoka.private.light import NEXT_BATCH, batch_size_of, batches_of, batches_taken

    owner, name = NEXT_BATCH
    take, main, clock, took = getattr(owner, name), threading.get_ident(), time.monotonic_ns, publisher.took
    known: dict[
        int, tuple[int, int]
    ] = {}  # size and number of batches, by the id of an iterator; its first batch sets it

    def begin(batches: Any) -> tuple[int, int]:
        if len(known) >= MOST_ITERATORS:
            known.clear()
        known[id(batches)] = found = batch_size_of(batches), batches_of(batches)
        return found

    def take_timed(batches: Any) -> Any:
        if threading.get_ident() != main or not publisher.active:
            return take(batches)
        begun = clock()
        batch = take(batches)
        spent = clock() - begun
        taken = batches_taken(batches)
        size, length = begin(batches) if taken == 1 else known.get(id(batches), NOTHING)
        took(spent, size, taken, length)
        return batch

    setattr(owner, name, take_timed)
