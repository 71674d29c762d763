"""The engine that finds and runs recorded programs: `_replay.c` where it was built, else `dispatch` itself.

Both build the same keys, check the same conditions, and find each other's programs; the one in C takes less time.
It is built when duoka is installed, if there is a C compiler.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.private.torch import (
    FORWARD_MODE,
    GLOBAL_HOOKS,
    count_dispatch_modes,
    exported_functions,
    function_modes_are_active,
    functions_are_enabled,
    implementation_of,
    make_wrapper,
    transform_level,
)
from duoka.system.environment import variable
from duoka.view.dispatch import replay
from duoka.view.dispatch.dispatch import count_write, dispatch, with_global_shapes
from duoka.view.dispatch.failing import BY_ITEM, RAISES_FOR_ROWS, may_fail
from duoka.view.shares.local import Outdated
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, may_write
from duoka.view.view import View

_VERSION = 6  # as in _replay.c
_IN_PYTHON = BatchTensor.__dict__["__torch_function__"]


def built() -> Any:
    """Return the engine in C; None if it was not built, or from other sources."""
    try:
        engine = import_module("duoka.view.dispatch._replay")
    except ImportError:
        return None
    return engine if engine.VERSION == _VERSION else None


def chosen() -> Any:
    """Return the engine in C if batches call it, else None."""
    return None if BatchTensor.keep is _keep else built()


def install() -> None:
    """Let batches call the engine in C, if it was built and `DUOKA_ENGINE` is not `python`."""
    BatchTensor.dispatch = dispatch
    use(None if variable("DUOKA_ENGINE") == "python" else built())


def use(engine: Any) -> None:
    """Let batches call the engine in C; None: that in Python."""
    for name in [name for name, value in vars(BatchTensor).items() if type(value) is _DESCRIPTOR]:
        delattr(BatchTensor, name)
    BatchTensor.__torch_function__ = _IN_PYTHON  # type: ignore[method-assign]
    BatchTensor.remake, BatchTensor.keep, BatchTensor.program = replay.remake, _keep, replay.in_python
    if engine is None or not _configure(engine):
        return
    for name, method in engine.methods_of(BatchTensor, _function_of).items():
        setattr(BatchTensor, name, method)
    BatchTensor.__torch_function__ = engine.call  # type: ignore[method-assign]
    BatchTensor.remake, BatchTensor.keep, BatchTensor.program = engine.made, engine.keep, partial(_program, engine)


def _program(engine: Any, program: replay.Expression, input_count: int) -> Any:
    """Make a function of recorded calls, in Python if they have too many parts for the engine."""
    return engine.program(program, input_count) or replay.in_python(program, input_count)


def _keep(*_: Any) -> None:
    """Do nothing: the engine in Python finds every program by its key."""


def _configure(engine: Any) -> bool:
    """Return True if the engine can work with this torch."""
    functions = exported_functions()
    if functions is None:
        return False
    tensor = torch.zeros(1)
    objects = {
        "batch": BatchTensor,
        "tensor": Tensor,
        "parameter": nn.Parameter,
        "size": torch.Size,
        "dtype": torch.dtype,
        "memory_format": torch.memory_format,
        "getter": type(_GRADIENT.__get__),
        "outdated": Outdated,
        "dispatch": dispatch,
        "made": replay.remake,
        "failed": _failed,
        "count_write": count_write,
        "replicate": _replicate,
        "may_raise": RAISES_FOR_ROWS,
        "may_fail": may_fail,
        "by_item": frozenset(BY_ITEM),
        "transform_level": transform_level,
        "forward_mode": FORWARD_MODE,
        "count_dispatch_modes": count_dispatch_modes,
        "may_write": may_write,
        "is_grad_enabled": torch.is_grad_enabled,
        "make_wrapper": make_wrapper,
        "zero": 0,
        "one": 1,
        "modes_are_active": function_modes_are_active,
        "is_enabled": functions_are_enabled,
        "module_hooks": GLOBAL_HOOKS,
        "leaves": LEAVES,
        "identity": nn.Identity,
    }
    return bool(engine.configure(functions, tensor, implementation_of(tensor), objects))


def _failed(error: Exception, func: Function, args: Args, kwargs: Kwargs, view: View) -> None:
    """Raise what one device raises, in place of an error of a program that the engine in C has run."""
    told = with_global_shapes(error, replay.DescribedCall(func, args, kwargs))
    view.raised(told)
    raise told from None


def _replicate(view: View, tensor: Tensor) -> Tensor:
    """Return what `View.replicate` returns."""
    try:
        return view.replicate(tensor)
    except Exception as error:
        view.raised(error)
        raise


# Modules whose `forward` calls a function with a batch and these attributes, the last ones by name:
# class -> (forward, function, number of attributes by name, attributes).
LEAVES: dict[type[nn.Module], tuple[Any, ...]] = {
    kind: (kind.forward, function, named, *attributes.split())
    for kind, function, named, attributes in (
        (nn.Identity, nn.Identity, 0, ""),
        (nn.Linear, F.linear, 0, "weight bias"),
        (nn.Embedding, F.embedding, 0, "weight padding_idx max_norm norm_type scale_grad_by_freq sparse"),
        (nn.LayerNorm, F.layer_norm, 0, "normalized_shape weight bias eps"),
        (nn.Dropout, F.dropout, 0, "p training inplace"),
        (nn.ReLU, F.relu, 0, "inplace"),
        (nn.GELU, F.gelu, 1, "approximate"),
        (nn.SiLU, F.silu, 0, "inplace"),
        (nn.Tanh, torch.tanh, 0, ""),
        (nn.Sigmoid, torch.sigmoid, 0, ""),
    )
}

_GRADIENT: Any = Tensor.grad
_DESCRIPTOR = type(Tensor.view)


class _Asked(Tensor):
    """A tensor whose methods return the function that torch passes to `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func


_ARGUMENTS: dict[str, tuple[Any, ...]] = {  # that torch accepts; a method without an entry is called with a number
    **dict.fromkeys(("contiguous", "flatten", "squeeze", "unbind", "mean", "sum", "__neg__"), ()),
    "transpose": (0, 0),
    "masked_fill": (torch.zeros(1), 0),
    "__matmul__": (torch.zeros(1),),
}


def _function_of(name: str) -> tuple[Any, Any]:
    """Return a method of Tensor, and the function that torch passes to `__torch_function__` for it."""
    method = getattr(Tensor, name)
    return method, method(torch.zeros(1).as_subclass(_Asked), *_ARGUMENTS.get(name, (0,)))
