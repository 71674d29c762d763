"""What looks below torch functions, and is given all rows: torch.func's transforms, forward-mode, dispatch modes.

A batch tensor stands for a batch in torch functions alone. Below them there are this rank's rows: a transform would
wrap these, and a script's own dispatch mode (or torch's counter of flops) would see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from duoka.private.torch import (
    count_dispatch_modes,
    dispatch_modes,
    in_forward_mode,
    transform_level,
    without_dispatch_modes,
    without_transforms,
)

_COUNTING = "torch.utils.flop_counter"


def looks_below() -> bool:
    """Whether something does, so that torch functions of batches are computed whole."""
    return (
        transform_level() is not None
        or in_forward_mode()
        or (count_dispatch_modes() > 0 and any(map(_is_scripts, dispatch_modes())))
    )


def _is_scripts(mode: Any) -> bool:
    where = type(mode).__module__
    return where == _COUNTING or not where.startswith(("torch.", "duoka."))


@contextmanager
def unseen() -> Iterator[None]:
    """Within, nothing looks below: rows are gathered."""
    with ExitStack() as stack:
        if transform_level() is not None:
            stack.enter_context(without_transforms())
        if count_dispatch_modes():
            stack.enter_context(without_dispatch_modes())
        yield
