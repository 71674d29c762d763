"""What a script shows of tensors, and the lines that warnings name: as `python` shows them.

A warning names the line that called the function that raises it. For a function of a batch this is a line of duoka,
which calls torch's function on behalf of the script's line.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from duoka.plain.session import Session
from duoka.private.python import SHOW_WARNING
from duoka.system.user_code import outer_frames
from duoka.view.tensor import outcome
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.outcome import backward_name

_SHOWN = re.compile(r"grad_fn=<\w+>")


def print_as_one_device(session: Session) -> None:
    """Intercept `Tensor.__repr__`."""

    @session.patches.around(Tensor, "__repr__")
    def show_tensor(original: Callable[..., str], self: Tensor, **how: Any) -> str:
        name = backward_name(self, session.view)
        text = original(self.full_tensor() if isinstance(self, BatchTensor) else self, **how)
        return text if name is None else _SHOWN.sub(f"grad_fn=<{name}>", text)


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
