"""A global batch in pieces, for gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Pieces:
    """The pieces of one global batch, in order; each is a batch itself.

    n: samples in the whole batch. weight: fraction of the present piece, its samples / n: multiply a mean loss by it,
    so that the accumulated gradients are those of the whole batch. Gradients are all-reduced with the last piece
    only.
    """

    def __init__(
        self,
        first: Any,
        others: Iterator[Any],
        sizes: tuple[int, ...],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.n, self.weight = sum(sizes), sizes[0] / sum(sizes)
        self._first, self._others, self._sizes, self._held = first, others, sizes, held
        self._yielded = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        for number, size in enumerate(self._sizes):
            if number < self._yielded:
                raise RuntimeError("the pieces of a batch can be iterated over only once")
            piece = self._first if number == 0 else next(self._others)
            self._yielded += 1
            self.weight = size / self.n
            with nullcontext() if self._yielded == len(self._sizes) else self._held():
                yield piece

    def finish(self) -> None:
        """Skip the pieces that the script did not take."""
        for _ in range(max(1, self._yielded), len(self._sizes)):
            next(self._others)
        self._yielded = len(self._sizes)
