"""Samples of a machine's ranks as a message to the command of machine 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from duoka.system.messages import printable
from duoka.watching.sample import RankSample

_FIELDS = fields(RankSample)[1:-1]  # without the rank, which follows from the order, and the time of receipt
LONGEST = 256  # characters of a text
HIGHEST = 1 << 62  # of a number


def as_message(ranks: Sequence[RankSample]) -> list[list[Any]]:
    """Return the samples of all ranks of a machine as plain data."""
    return [[getattr(one, field.name) for field in _FIELDS] for one in ranks]


def checked(value: Any, count: int) -> list[list[Any]]:
    """Check a received message. count: of the machine's ranks.

    Raises:
        ValueError: it is not one of `as_message`.
    """
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"not the samples of {count} ranks")
    return [_checked_rank(one) for one in value]


def _checked_rank(values: Any) -> list[Any]:
    if not isinstance(values, list) or len(values) != len(_FIELDS):
        raise ValueError("not the sample of a rank")
    kinds = [type(getattr(_ANY, field.name)) for field in _FIELDS]
    return [_checked_value(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _checked_value(value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, str):
        return printable(value[:LONGEST])[:LONGEST]
    if kind is not str and type(value) in (int, kind) and 0 <= value < HIGHEST:  # false for NaN
        return kind(value)
    raise ValueError("not the sample of a rank")


_ANY = RankSample(0, 0)
