"""Choices in a program, in a form in which generators read well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.program import Program

T = TypeVar("T")
# Cycles that hold rows: of them, ranks collect some earlier than others (`Ranks`), when a script makes many objects.
GARBAGE = (
    "garbage = [x * 2]; garbage += [garbage, garbage[0][0]]; del garbage",
    "garbage = [x.clone()]; garbage += [garbage, garbage[0][1]]; garbage[0].mul_(2); garbage[2].add_(1); del garbage",
    "garbage = [x * 1]; garbage += [garbage, garbage[0].data[0], garbage[0].detach()]; del garbage",
)
GARBAGE_OF_MODEL = (
    "garbage = [p.detach() for p in net.parameters()]; garbage += [garbage, garbage[0][0]]; del garbage",
    "garbage = [p.grad for p in net.parameters()]; garbage += [garbage, garbage[0][0]]; del garbage",
    "garbage = [copy.deepcopy(net)]; garbage += [garbage, *(p.data[0] for p in garbage[0].parameters())]",
)
COLLECTING = "[[] for _ in range(3000)]"


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

    def littered(self, program: Program) -> Program:
        """Return the program, or one with statements that make garbage of rows."""
        if not self.chance(15):
            return program
        body = list(program.body)
        of_model = GARBAGE_OF_MODEL if any(line.startswith("net = ") for line in program.header) else ()
        self.insert(body, (*GARBAGE, *of_model), self.number(1, 3))
        self.insert(body, (COLLECTING,), self.number(1, 2))
        return replace(program, body=tuple(body))

    def shuffled(self, values: Sequence[T]) -> list[T]:
        return self._random.sample(values, len(values))


def programs(make: Callable[[Draws], Program]) -> SearchStrategy[Program]:
    """Return the strategy of programs that `make` draws.

    Hypothesis draws the seeds only: it would vary its own choices a little from program to program, and statements
    are left out of programs by `smallest`, which knows what a statement is.
    """

    def drawn(random: Random) -> Program:
        draws = Draws(random)
        return draws.littered(make(draws))

    return st.randoms(use_true_random=True).map(drawn)
