"""What can be logged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from duoka.errors import OptionError
from duoka.logs.base import Value
from duoka.view.batch import BatchTensor


def number_of(name: str, value: Any) -> Value:
    """A number or a text; a tensor of one element is one. Talks to no other rank.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, BatchTensor):
        raise OptionError(f"run.log({name}=...)", "a whole batch", "a number", f"for example {name}.mean()")
    is_array = isinstance(value, (Tensor, np.generic, np.ndarray))
    if is_array and math.prod(value.shape) == 1:
        found: Value = value.item()
        return found
    raise OptionError(f"run.log({name}=...)", type(value).__name__, "a number, a text or a tensor of one element")
