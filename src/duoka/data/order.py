"""The order in which a loader reads: resumed within an epoch, and cut into pieces, as for gradient accumulation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, RandomSampler

from duoka.view.random.generators import random_states, set_random_states
from duoka.view.shares.partition import Partition


class ResumableSampler:
    """A batch sampler that can start at a later batch.

    sampler: from which it has its numbers. skip: number of batches that each iteration skips.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], sampler: object = None) -> None:
        self._batches, self.skip = batches, 0
        # Whose generator is the CPU's, on which torch then does not draw where the default device is another.
        self._draws_on_cpu = type(sampler) is RandomSampler and sampler.generator is None
        self._epoch: _EpochBatches | None = None

    def __iter__(self) -> Iterator[list[Any]]:
        self._epoch = _EpochBatches(iter(self._batches), self.skip, self._draws_on_cpu)
        return self._epoch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def draw(self) -> None:
        """Draw the order of the current epoch now, instead of with its first batch."""
        if self._epoch is not None:
            self._epoch.fetch()


class _EpochBatches:
    """The batches of one epoch."""

    def __init__(self, batches: Iterator[Sequence[Any]], skip: int, draws_on_cpu: bool) -> None:
        self._batches, self._skip, self._draws_on_cpu = batches, skip, draws_on_cpu
        self._next: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        self.fetch()
        if not self._next:
            raise StopIteration
        return self._next.popleft()

    def fetch(self) -> None:
        """Fetch the next batch, if there is one."""
        while not self._next:
            with torch.device("cpu") if self._draws_on_cpu else nullcontext():
                batch = next(self._batches, None)
            if batch is None:
                return
            if self._skip:
                self._skip -= 1
            else:
                self._next.append(list(batch))


class PieceSampler:
    """A batch sampler that splits batches into pieces. groups: the sizes of the pieces of each batch, in order.

    accumulate: number of pieces; micro_batch: maximum number of samples of a piece. Give exactly one of the two.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], accumulate: int | None, micro_batch: int | None) -> None:
        self._batches, self._accumulate, self._micro_batch = batches, accumulate, micro_batch
        self.groups: deque[tuple[int, ...]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.groups.clear()
        for batch in self._batches:
            indices = list(batch)
            sizes = self.sizes(len(indices))
            self.groups.append(sizes)
            start = 0
            for size in sizes:
                yield indices[start : start + size]
                start += size

    def sizes(self, n: int) -> tuple[int, ...]:
        """Return the sizes of the pieces of a batch of n samples: as even as possible, none empty."""
        count = self._accumulate or -(-n // (self._micro_batch or n))
        return Partition(n, 0, min(count, n)).sizes


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


def generator_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of all generators from which the order of an epoch may be drawn."""
    of_torch, of_python, of_numpy = random_states()
    states: dict[str, Any] = {
        "torch": of_torch["cpu"],
        "python": [of_python[0], list(of_python[1]), of_python[2]],
        "numpy": [of_numpy[0], torch.from_numpy(of_numpy[1].astype(np.int64)), *of_numpy[2:]],
    }
    generators = _own_generators(loader)
    return states | {name: generator.get_state() for name, generator in generators.items()}


@contextmanager
def drawing_from(states: dict[str, Any], loader: DataLoader[Any]) -> Iterator[None]:
    """Set the generators to `states`; afterwards restore those of the script."""
    before = random_states()
    torch.set_rng_state(states["torch"])
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    for name, generator in _own_generators(loader).items():
        if isinstance(states.get(name), Tensor):
            generator.set_state(states[name])
    try:
        yield
    finally:
        set_random_states(before)


def _own_generators(loader: DataLoader[Any]) -> dict[str, Generator]:
    """Return the generators that belong to this loader."""
    candidates = {"loader": loader.generator, "sampler": getattr(loader.sampler, "generator", None)}
    return {name: generator for name, generator in candidates.items() if isinstance(generator, Generator)}
