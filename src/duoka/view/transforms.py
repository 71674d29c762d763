"""Detect torch.func transforms, forward-mode differentiation and dispatch modes, which act on operators below rules.

Rules exist for torch functions. The operators below these get this rank's rows, which a transform would wrap, and
which a script's own dispatch mode (or torch's FLOP counter) would see. Under one, functions are computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from duoka.private.torch import (
    count_dispatch_modes,
    dispatch_modes,
    in_forward_mode,
    transform_level,
    without_dispatch_modes,
    without_transforms,
)

_COUNTING = "torch.utils.flop_counter"
_TRACING = ("torch._subclasses.", "torch.fx.")


def operators_are_observed() -> bool:
    """Return True if torch functions of batches must be computed whole."""
    return (
        transform_level() is not None
        or in_forward_mode()
        or (count_dispatch_modes() > 0 and any(map(_is_scripts, dispatch_modes())))
    )


def records_gradients() -> bool:
    """Return True if autograd records what is computed now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def is_tracing() -> bool:
    """Return True while torch.compile traces a graph with tensors that have no values."""
    return count_dispatch_modes() > 0 and any(type(mode).__module__.startswith(_TRACING) for mode in dispatch_modes())


def _is_scripts(mode: Any) -> bool:
    where = type(mode).__module__
    return where == _COUNTING or not where.startswith(("torch.", "duoka."))


@contextmanager
def without_modes() -> Iterator[None]:
    """Suspend transforms and dispatch modes, to gather rows."""
    with ExitStack() as stack:
        if transform_level() is not None:
            stack.enter_context(without_transforms())
        if count_dispatch_modes():
            stack.enter_context(without_dispatch_modes())
        yield
