"""Functions of torch that make tensors of tensors and ask nobody: they would look inside a batch tensor.

And one that asks without all that it was given: `F.l1_loss` leaves its weight out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.plain.session import Session
from duoka.private.torch import backward_engine, note_constructors
from duoka.view.batch import BatchTensor, batches_in, gather_all
from duoka.view.own_rows import compute_opaque
from duoka.view.rules.lookup import argument
from duoka.view.vouched import names_of_class
from duoka.view.whole import compute_whole


def install(session: Session) -> None:
    """Intercept these, `Variable`, `nn.Parameter` and the application of the script's own Functions."""

    def make_whole(original: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*args: Any, **kwargs: Any) -> Any:
            if batches_in((args, kwargs)):
                return compute_whole(original, args, kwargs)
            return original(*args, **kwargs)

        return whole

    def make_apply(original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)
            if not any(isinstance(value, BatchTensor) for value in args):
                return bound(*args, **kwargs)
            if cls.__module__.startswith(_KEEPING_ROWS):
                return _of_rows(bound, args)
            return compute_opaque(names_of_class(cls), bound, args, kwargs)

        return classmethod(apply)

    def make_weighted(original: Callable[..., Any]) -> Callable[..., Any]:
        def l1_loss(*args: Any, **kwargs: Any) -> Any:
            batches = batches_in((args, kwargs))
            if not batches or argument(args, kwargs, 5, "weight") is None:
                return original(*args, **kwargs)
            return type(batches[0]).__torch_function__(original, (), args, kwargs)

        return l1_loss

    note_constructors()  # while these are torch's own
    session.patches.replace(F, "l1_loss", make_weighted)
    for name in ("tensor", *_SPARSE):
        session.patches.replace(torch, name, make_whole)
    apply = inspect.getattr_static(torch.autograd.Function, "apply")
    session.patches.put(torch.autograd.Function, "apply", make_apply(apply))
    session.patches.put(torch.autograd, "Variable", Variable)
    session.patches.put(nn.Parameter, "__new__", _parameter)


_SPARSE = [f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")]
_KEEPING_ROWS = "torch.distributed.fsdp"  # Functions that give the tensors that they are given


def _of_rows(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a Function that gives each tensor as it is: to own rows."""
    out = function(*(value._local if isinstance(value, BatchTensor) else value for value in args))
    given = [value for value in args if isinstance(value, Tensor)]
    return tuple(
        BatchTensor(rows, was._spec) if isinstance(was, BatchTensor) else rows
        for rows, was in zip(out, given, strict=True)
    )


class _IsTensor(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor)


class Variable(metaclass=_IsTensor):
    """`torch.autograd.Variable`, which has meant a tensor since torch 0.4."""

    _execution_engine = backward_engine

    def __new__(cls, data: Any = None, requires_grad: bool = False, volatile: bool = False) -> Any:
        """The tensor itself, or one that shares its memory and asks for a gradient."""
        if not requires_grad:
            return data
        return data.detach().requires_grad_()


_new_parameter = nn.Parameter.__new__


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """`nn.Parameter(batch)`: all rows, the same on every rank, as any parameter."""
    return _new_parameter(cls, gather_all(data), requires_grad)
