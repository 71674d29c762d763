from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duoka.data.dataset_state import DatasetState, state_of

outside = random.Random(0)
counter = 0


def draws_outside(index: int) -> float:
    return outside.random()


def counts_outside(index: int) -> int:
    global counter
    counter += 1
    return counter


class Counting:
    made = 0

    def __call__(self, index: int) -> int:
        type(self).made += 1
        return index


class Slots(SimpleNamespace):
    rng: Any

    def __call__(self, index: int) -> Any:
        return self.rng.random()


def closure() -> Callable[[int], Any]:
    rng = np.random.default_rng(0)
    return lambda index: rng.random()


def listing() -> Callable[[int], Any]:
    seen: list[int] = []
    return lambda index: seen.append(index)


def marking() -> Callable[[int], Any]:
    seen = np.zeros(5)

    def mark(index: int) -> None:
        seen[index] += 1

    return mark


def stamping() -> Callable[[int], Any]:
    seen = torch.zeros(5)

    def mark(index: int) -> None:
        seen[index] += 1

    return mark


def default(index: int, rng: random.Random = random.Random(1)) -> float:  # noqa: B008
    return rng.random()


REMEMBERS: dict[str, Callable[[int], Any]] = {
    "a generator outside": draws_outside,
    "a number outside": counts_outside,
    "a class": Counting(),
    "an attribute": Slots(rng=random.Random(3)),
    "numpy's RandomState": Slots(rng=np.random.RandomState(3)),
    "a closure": closure(),
    "a list": listing(),
    "an array": marking(),
    "a tensor": stamping(),
    "a default": default,
    "a partial": functools.partial(Slots(rng=random.Random(3)).__call__),
    "a count": functools.partial(next, itertools.count()),  # type: ignore[dict-item]
    "torch": lambda index, own=torch.Generator(): torch.rand(1, generator=own),  # type: ignore[misc]  # noqa: B008
}


@pytest.mark.parametrize("read", REMEMBERS.values(), ids=REMEMBERS)
def test_what_remembers_is_seen(read: Callable[[int], Any]) -> None:
    dataset = SimpleNamespace(parts=[SimpleNamespace(transform=read)], root="data", size=float("nan"))
    before = DatasetState(dataset)
    assert before.changed(DatasetState(dataset)) is None
    read() if isinstance(read, functools.partial) and read.func is next else read(1)
    assert before.changed(DatasetState(dataset))


def test_what_only_reads_does_not() -> None:
    rows, table = torch.arange(5.0), {"a": [1, 2], "b": np.arange(3)}
    table["self"] = table  # a circle comes to an end

    def read(index: int) -> Any:
        return rows[index] + table["b"][1] + random.random()

    before = DatasetState(read)
    read(1)
    assert before.changed(DatasetState(read)) is None
    assert before.generators == []


def test_the_change_is_named() -> None:
    dataset = SimpleNamespace(transform=Slots(rng=random.Random(3)), read=0)
    before = DatasetState(dataset)
    dataset.transform(0)
    assert before.changed(DatasetState(dataset)) == "transform.rng"
    assert [state_of(generator) is not None for generator in before.generators] == [True]
    assert state_of(3) is None
    assert state_of(random.SystemRandom()) is None
