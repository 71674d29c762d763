"""Register hooks without changing the ids of a script's own hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from torch.utils.hooks import RemovableHandle

from duoka.private.torch import WithoutTorchFunctions

_numbers = count(1)


@contextmanager
def unnumbered() -> Iterator[None]:
    """Give hooks registered in this context negative ids: a script may print those of its own, from 0 on."""
    before = RemovableHandle.next_id
    RemovableHandle.next_id = first = -(next(_numbers) << 8)  # room for what is registered in one context
    try:
        with WithoutTorchFunctions():  # a mode would look up the replaced function
            yield
    finally:
        assert RemovableHandle.next_id - first < 1 << 8
        RemovableHandle.next_id = before
