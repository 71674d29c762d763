"""Checks of the values given to `run.log`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from duoka.errors import OptionError
from duoka.logs.base import Value
from duoka.view.tensor.batch import BatchTensor

ARRAYS = (Tensor, np.generic, np.ndarray)


def check_step(step: object) -> None:
    """Check that `step` is a whole number or None, not a value passed in its position.

    Raises:
        OptionError: it is of another type.
    """
    if step is not None and not isinstance(step, (int, np.integer)):
        hint = "values are given by their names: run.log(step=3, loss=loss)"
        raise OptionError("run.log(step=...)", type(step).__name__, "a whole number, or left out", hint)


def check_values(values: dict[str, Any]) -> None:
    """Check the types of the values, without reading a tensor's data. Every rank calls this; only rank 0 writes.

    Raises:
        OptionError: one is not a number, a text, or a tensor of one element.
    """
    for name, value in values.items():
        if isinstance(value, BatchTensor):
            raise OptionError(f"run.log({name}=...)", "a whole batch", "a number", f"for example {name}.mean()")
        if isinstance(value, (int, float, str)) or (isinstance(value, ARRAYS) and math.prod(value.shape) == 1):
            continue
        raise OptionError(f"run.log({name}=...)", type(value).__name__, "a number, a text or a tensor of one element")


def number_of(name: str, value: Any) -> Value:
    """Convert a value to a Python number or text, without communication.

    Raises:
        OptionError: it is not a number, a text, or a tensor of one element.
    """
    check_values({name: value})
    found: Value = value.item() if isinstance(value, ARRAYS) else value
    return found
