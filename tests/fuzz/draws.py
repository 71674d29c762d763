"""Choices of hypothesis, in a form in which generators read well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Draws:
    """The choices of one program."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))  # type: ignore[no-any-return]

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))  # type: ignore[no-any-return]

    def chance(self, percent: int) -> bool:
        return self.number(0, 99) >= 100 - percent

    def shuffled(self, values: Sequence[T]) -> list[T]:
        return list(self._draw(st.permutations(values)))
