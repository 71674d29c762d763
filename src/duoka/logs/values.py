"""What can be logged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from duoka.errors import OptionError
from duoka.logs.base import Value
from duoka.view.batch import BatchTensor

ARRAYS = (Tensor, np.generic, np.ndarray)


def check_step(step: object) -> None:
    """See that a step is one: values are easily given in its place.

    Raises:
        OptionError: it is no whole number, and not left out.
    """
    if step is not None and not isinstance(step, (int, np.integer)):
        hint = "values are given by their names: run.log(step=3, loss=loss)"
        raise OptionError("run.log(step=...)", type(step).__name__, "a whole number, or left out", hint)


def check_values(values: dict[str, Any]) -> None:
    """See that values can be logged, without reading any: on every rank, whichever writes.

    Raises:
        OptionError: one is no number, text, or tensor of one element.
    """
    for name, value in values.items():
        if isinstance(value, BatchTensor):
            raise OptionError(f"run.log({name}=...)", "a whole batch", "a number", f"for example {name}.mean()")
        if isinstance(value, (int, float, str)) or (isinstance(value, ARRAYS) and math.prod(value.shape) == 1):
            continue
        raise OptionError(f"run.log({name}=...)", type(value).__name__, "a number, a text or a tensor of one element")


def number_of(name: str, value: Any) -> Value:
    """A number or a text; a tensor of one element is one. Talks to no other rank.

    Raises:
        OptionError: it is something else.
    """
    check_values({name: value})
    found: Value = value.item() if isinstance(value, ARRAYS) else value
    return found
