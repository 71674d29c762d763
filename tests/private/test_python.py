from __future__ import annotations

import gc
import weakref

from duoka.private.python import skip_at_exit


class Owner:
    """Owns what is finalized with it; refers to itself, so that only a collection finds it."""

    def __init__(self) -> None:
        self.itself = self
        weakref.finalize(self, int)


def test_finalizers_may_go_while_they_are_searched() -> None:
    kept = [weakref.finalize(Owner, list) for _ in range(2)]
    before = gc.get_threshold()
    gc.collect()
    gc.disable()
    for _ in range(100):
        Owner()
    gc.set_threshold(gc.get_count()[0] + 20)  # so many objects later
    gc.enable()
    try:
        skip_at_exit(list)
    finally:
        gc.set_threshold(*before)
    assert [finalizer.atexit for finalizer in kept] == [False, False]
    for finalizer in kept:
        finalizer.detach()
