"""Steps of optimizers, and batches that are taken from loaders."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from duoka.publishing.epochs import EpochLoops

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher


def install(publisher: Publisher, tells: bool) -> None:
    """Observe the steps and loaders of this process; torch is imported. tells: also find the loop over epochs."""
    _count_steps(publisher)
    _time_loaders(publisher, tells)


def _count_steps(publisher: Publisher) -> None:
    """Record the number of steps: those of the optimizer that has made most."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.hooks import RemovableHandle

    from duoka.private.light import not_compiled

    slot = publisher.slot
    steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    most = 0

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        number = steps[optimizer] = steps.get(optimizer, 0) + 1
        if number > most and publisher.active:
            most = number
            slot.step(number)

    before, RemovableHandle.next_id = RemovableHandle.next_id, -1  # a script may print the ids of its own hooks
    register_optimizer_step_post_hook(not_compiled(count))
    RemovableHandle.next_id = before


def _time_loaders(publisher: Publisher, tells: bool) -> None:
    """Record how long the main thread waits for batches, their samples, and where it is in the loader."""
    from duoka.private.light import NEXT_BATCH, batch_size_of, batches_of, batches_taken

    owner, name = NEXT_BATCH
    take, main, clock, slot = getattr(owner, name), threading.get_ident(), time.monotonic_ns, publisher.slot
    loops = EpochLoops(publisher)
    lengths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def take_timed(batches: Any) -> Any:
        if threading.get_ident() != main or not publisher.active:
            return take(batches)
        begin = clock()
        batch = take(batches)
        slot.load(clock() - begin, batch_size_of(batches))
        taken = batches_taken(batches)
        if taken == 1:
            lengths[batches] = batches_of(batches)
            if tells:
                loops.look()
        slot.batch(taken, lengths.get(batches, 0))
        return batch

    setattr(owner, name, take_timed)
