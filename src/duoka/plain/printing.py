"""Printing of tensors, with the name of the backward function that torch would show on one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from duoka.plain.session import Session
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.outcome import backward_name

_SHOWN = re.compile(r"grad_fn=<\w+>")


def install(session: Session) -> None:
    """Intercept `Tensor.__repr__`."""

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def __repr__(self: Tensor, **how: Any) -> str:
            name = backward_name(self, session.view)
            text = original(self.full_tensor() if isinstance(self, BatchTensor) else self, **how)
            return text if name is None else _SHOWN.sub(f"grad_fn=<{name}>", text)

        return __repr__

    session.patches.replace(Tensor, "__repr__", make)
