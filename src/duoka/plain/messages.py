"""What a script shows of tensors, and the lines that warnings name: as `python` shows them.

A warning names the line that called the function that raises it. For a function of a batch this is a line of duoka,
which calls torch's function on behalf of the script's line.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from duoka.plain.session import Session
from duoka.private.python import SHOW_WARNING
from duoka.private.torch import backward_of
from duoka.system.user_code import outer_frames
from duoka.view.tensor import outcome
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.outcome import backward_name


def print_as_one_device(session: Session) -> None:
    """Intercept `Tensor.__repr__`."""

    @session.patches.around(Tensor, "__repr__")
    def show_tensor(original: Callable[..., str], self: Tensor, **how: Any) -> str:
        name = backward_name(self)
        if isinstance(self, BatchTensor) or name is not None:
            self = _like_one_device(self, name)
        return original(self, **how)


def _like_one_device(tensor: Tensor, name: str | None) -> Tensor:
    """Return a tensor of these values, with a `grad_fn` of this name, or a leaf: lines break by what follows them."""
    asks = tensor.requires_grad
    with torch.no_grad():
        values = (tensor.full_tensor() if isinstance(tensor, BatchTensor) else tensor).detach()
    if not asks:
        return values
    with torch.inference_mode(False), torch.enable_grad():
        leaf = values.clone().requires_grad_()
        return leaf if name is None else _function_of_node(name).apply(leaf)


@cache
def _function_of_node(name: str) -> type[torch.autograd.Function]:
    """Return a function of which autograd's node has this name."""
    function = type(name, (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, tensor: tensor.clone())})
    backward_of(function).__name__ = name
    return function


_DUOKA = str(Path(__file__).parents[1]) + "/"
_OVERRIDES = "/torch/overrides.py"  # called by torch's functions, of which one then stands twice on the stack


def attribute_warnings(session: Session) -> None:
    """Intercept the function that shows a warning."""
    warnings.filterwarnings("always", module=r"duoka\.")  # the script's filters apply to its own line

    @session.patches.around(*SHOW_WARNING)
    def show_warning(original: Callable[..., Any], message: warnings.WarningMessage) -> None:
        if message.filename == outcome.__file__:  # which calls a function a second time
            return
        frame = _caller(message.filename) if message.filename.startswith(_DUOKA) else None
        if frame is None:
            original(message)
            return
        space = frame.f_globals
        warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            space.get("__name__"),
            space.setdefault("__warningregistry__", {}),
            source=message.source,
        )


def _caller(filename: str) -> FrameType | None:
    """Return the frame, outside of duoka, on behalf of which this file of duoka called a function of torch."""
    frames = outer_frames(sys._getframe(1))
    for frame in frames:
        if frame.f_code.co_filename == filename:
            break
    for frame in frames:
        name = frame.f_code.co_filename
        if name.endswith(_OVERRIDES):
            next(frames, None)
        elif not name.startswith(_DUOKA):
            return frame
    return None
