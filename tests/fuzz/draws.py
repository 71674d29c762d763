"""Choices in a program, in a form in which generators read well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.program import Program

T = TypeVar("T")


class Draws:
    """The choices of one program."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def chance(self, percent: int) -> bool:
        return self._random.random() < percent / 100

    def preamble(self) -> str:
        """Return the statement that sets seed and precision."""
        dtype = self.pick(["float64", "float64", "float32"])
        return f"torch.manual_seed({self.number(0, 99)}); torch.set_default_dtype(torch.{dtype})"

    def insert(self, body: list[str], options: Sequence[str], count: int) -> None:
        """Insert `count` of the options anywhere in a body; parts of one, separated by "|", in this order."""
        for _ in range(count):
            place = 0
            for statement in self.pick(options).split(" | "):
                place = self.number(place, len(body))
                body.insert(place, statement)
                place += 1

    def shuffled(self, values: Sequence[T]) -> list[T]:
        return self._random.sample(values, len(values))


def programs(make: Callable[[Draws], Program]) -> SearchStrategy[Program]:
    """Return the strategy of programs that `make` draws.

    Hypothesis draws the seeds only: it would vary its own choices a little from program to program, and statements
    are left out of programs by `smallest`, which knows what a statement is.
    """
    return st.randoms(use_true_random=True).map(lambda random: make(Draws(random)))
