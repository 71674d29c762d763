from __future__ import annotations

import functools
import io
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

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


def last() -> Callable[[int], Any]:
    rows, kept = torch.arange(5.0), [torch.tensor(0.0)]

    def difference(index: int) -> Tensor:
        before, kept[0] = kept[0], rows[index]
        return kept[0] - before

    return difference


def lines(file: Any) -> Callable[[int], Any]:
    return lambda index: file.readline()


def of_function(index: int) -> int:
    of_function.calls += 1  # type: ignore[attr-defined]
    return index


of_function.calls = 0  # type: ignore[attr-defined]


class Recent:
    read: ClassVar[deque[int]] = deque(maxlen=2)

    def __call__(self, index: int) -> None:
        self.read.append(index)


class Total:
    sum = 0


def of_named_class(index: int) -> None:
    Total.sum += index


def of_module(index: int) -> None:
    module.counter += 1


module: Any = ModuleType("module")
module.counter = 0
module.__file__ = __file__


@dataclass(slots=True)
class InSlots:
    made: int = 0

    def __call__(self, index: int) -> None:
        self.made += 1


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
    "the tensor read last": last(),
    "a file": lines(io.StringIO("1\n2\n")),
    "a function's attribute": of_function,
    "slots": InSlots(),
    "a list of the class": Recent(),
    "a class that the code names": of_named_class,
    "a module that the code names": of_module,
    "a default": default,
    "a partial": functools.partial(Slots(rng=random.Random(3)).__call__),
    "torch": lambda index, own=torch.Generator(): torch.rand(1, generator=own),  # type: ignore[misc]  # noqa: B008
}


@pytest.mark.parametrize("read", REMEMBERS.values(), ids=REMEMBERS)
def test_what_remembers_is_seen(read: Callable[[int], Any]) -> None:
    dataset = SimpleNamespace(parts=[SimpleNamespace(transform=read)], root="data", size=float("nan"))
    before = DatasetState(dataset)
    assert before.changed(DatasetState(dataset)) is None
    read(1)
    assert before.changed(DatasetState(dataset))


@pytest.mark.parametrize("values", [itertools.count(), itertools.cycle([1, 2]), (row for row in range(9))])
def test_an_iterator_counts_as_changed(values: Any) -> None:
    before = DatasetState(lambda index: next(values))
    assert before.changed(DatasetState(lambda index: next(values)))


def test_what_only_reads_does_not() -> None:
    rows, table = torch.arange(5.0), {"a": [1, 2], "b": np.arange(3)}
    table["self"] = table  # a circle comes to an end

    def read(index: int) -> Any:
        return rows[index] + table["b"][1] + random.random()

    before = DatasetState(read)
    read(1)
    assert before.changed(DatasetState(read)) is None
    assert before.generators == []


def test_an_attribute_is_no_variable_of_its_name() -> None:
    holder = SimpleNamespace(counter=1)

    def read(index: int) -> Any:
        return holder.counter

    before = DatasetState(read)
    counts_outside(1)
    assert before.changed(DatasetState(read)) is None


def test_the_change_is_named() -> None:
    dataset = SimpleNamespace(transform=Slots(rng=random.Random(3)), read=0)
    before = DatasetState(dataset)
    dataset.transform(0)
    assert before.changed(DatasetState(dataset)) == "transform.rng"
    assert [state_of(generator) is not None for generator in before.generators] == [True]
    assert state_of(3) is None
    assert state_of(random.SystemRandom()) is None
