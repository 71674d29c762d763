"""Hashes of tensors: numbers that are equal on all ranks, so that a set of parameters has one order.

By default a tensor's hash is its address. Some libraries make an optimizer for each parameter of a set, and duoka
broadcasts the parameters of each in turn.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import ref

from torch import Tensor

from duoka.plain.session import Session


def install(session: Session) -> None:
    """Let a tensor's hash be the number of tensors hashed before it, where all ranks run the same code.

    This stays when the run ends, and in forked processes, which inherit sets and dictionaries of tensors.
    """
    known: dict[int, tuple[int, ref[Tensor]]] = getattr(Tensor.__hash__, "known", {})  # by identity
    numbers = count()

    def number(tensor: Tensor) -> int:
        try:
            return known[id(tensor)][0]
        except KeyError:
            key = id(tensor)
            known[key] = next(numbers) if session.caller.may_communicate() else key, ref(tensor, _forget(known, key))
            return known[key][0]

    number.known = known  # type: ignore[attr-defined]
    Tensor.__hash__ = number  # type: ignore[method-assign]


def _forget(known: dict[int, Any], key: int) -> Any:
    return lambda _: known.pop(key, None)
