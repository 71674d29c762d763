"""The original versions of the torch functions that duoka replaces for scripts, for its own calls and hooks.

Under a TorchFunctionMode (`torch.set_default_device`, `with torch.device(...)`) torch looks a function up again by
its name, and finds the replacement. So these calls bypass modes, or have the original under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from duoka.private.torch import WithoutTorchFunctions


def _finding_itself(function: Any) -> Any:
    """Copy a function so that its name refers to the copy; modes still apply to a backward pass in it."""
    names = dict(function.__globals__)
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copy
    return copy


def _past_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with WithoutTorchFunctions():
            return function(*args)

    return called


grad = _finding_itself(torch.autograd.grad)
register_hook = _past_modes(Tensor.register_hook)
retain_grad = _past_modes(Tensor.retain_grad)
when_accumulated = _past_modes(Tensor.register_post_accumulate_grad_hook)


_numbers = count(1)


@contextmanager
def unnumbered() -> Iterator[None]:
    """Give hooks registered in this context negative ids: a script may print those of its own, from 0 on."""
    before = RemovableHandle.next_id
    RemovableHandle.next_id = first = -(next(_numbers) << 8)  # room for what is registered in one context
    try:
        with WithoutTorchFunctions():  # a mode would look up the replaced function
            yield
    finally:
        assert RemovableHandle.next_id - first < 1 << 8
        RemovableHandle.next_id = before
