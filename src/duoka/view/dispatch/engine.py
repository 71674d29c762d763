"""The engine that finds and runs recorded programs: `_replay.c` where it was built, else `dispatch` itself.

Both build the same keys, check the same conditions, and find each other's programs; the one in C takes less time.
It is built when duoka is installed, if there is a C compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from duoka.environment import variable
from duoka.private.torch import count_dispatch_modes, in_forward_mode, make_wrapper, transform_level
from duoka.view.dispatch import replay
from duoka.view.dispatch.dispatch import count_write, dispatch, replay_failed, replicate
from duoka.view.dispatch.failing import BY_ITEM, RAISES_FOR_ROWS, may_fail
from duoka.view.tensor.batch import BatchTensor

_VERSION = 1  # as in _replay.c
_IN_PYTHON = BatchTensor.__dict__["__torch_function__"]


def built() -> Any:
    """Return the engine in C; None if it was not built, or from other sources."""
    try:
        engine = import_module("duoka.view.dispatch._replay")
    except ImportError:
        return None
    return engine if engine.VERSION == _VERSION else None


def install() -> None:
    """Let batches call the engine in C, if it was built and `DUOKA_ENGINE` is not `python`."""
    BatchTensor.dispatch = dispatch
    use(None if variable("DUOKA_ENGINE") == "python" else built())


def use(engine: Any) -> None:
    """Let batches call the engine in C; None: that in Python."""
    if engine is None:
        BatchTensor.__torch_function__ = _IN_PYTHON  # type: ignore[method-assign]
        BatchTensor.remake = replay.remake
        return
    engine.configure(
        batch=BatchTensor,
        tensor=Tensor,
        parameter=nn.Parameter,
        size=torch.Size,
        constants=replay.CONSTANTS,
        true=replay.TRUE,
        false=replay.FALSE,
        list=replay.LIST,
        tuple=replay.TUPLE,
        plain=replay.PLAIN,
        outdated=replay.Outdated,
        dispatch=dispatch,
        made=replay.remake,
        failed=replay_failed,
        count_write=count_write,
        replicate=replicate,
        may_raise=RAISES_FOR_ROWS,
        may_fail=may_fail,
        by_item=frozenset(BY_ITEM),
        transform_level=transform_level,
        in_forward_mode=in_forward_mode,
        count_dispatch_modes=count_dispatch_modes,
        is_inference_mode=torch.is_inference_mode_enabled,
        is_grad_enabled=torch.is_grad_enabled,
        make_wrapper=make_wrapper,
        zero=0,
        one=1,
    )
    BatchTensor.__torch_function__ = engine.call  # type: ignore[method-assign]
    BatchTensor.remake = engine.made
