"""Functions of torch that create tensors from tensors, and bypass `__torch_function__`.

`F.l1_loss` calls it, but leaves out its weight. `torch.unique_consecutive(x, True)` passes it `return_inverse=True`,
and without it takes the argument for `return_counts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import BackwardHook

from duoka.plain.session import Session
from duoka.private.torch import WithoutTorchFunctions, backward_engine, note_constructors, tree_map_only
from duoka.strategies.base import Strategy
from duoka.view.dispatch.own_rows import compute_opaque, names_of_class
from duoka.view.rules.lookup import argument
from duoka.view.shares.layout import StraightThrough
from duoka.view.tensor.batch import BatchTensor, batches_in
from duoka.view.whole import compute_whole, gather_sharing


def install(session: Session) -> None:
    """Intercept these functions, `Variable`, `nn.Parameter`, setters, and `apply` of the script's Functions."""
    note_constructors()  # before they are replaced
    patches = session.patches

    @patches.around(torch, "tensor", "asarray", "to_dlpack", "unique_consecutive", *_SPARSE)
    @patches.around(torch.utils.dlpack, "to_dlpack")
    @patches.around(torch.nested, "nested_tensor")
    def of_whole(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return compute_whole(original, args, kwargs) if batches_in((args, kwargs)) else original(*args, **kwargs)

    @patches.around(Tensor, "new_tensor")
    def new_tensor(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        make = original if isinstance(tensor, BatchTensor) else partial(of_whole, original)
        return make(tensor, *args, **kwargs)

    @patches.around(torch, "as_tensor")
    def as_tensor(original: Callable[..., Any], data: Any, *, dtype: Any = None, device: Any = None) -> Any:
        if not isinstance(data, BatchTensor):
            return of_whole(original, data, dtype=dtype, device=device)
        return data.to(device=device or data.device, dtype=dtype or data.dtype)

    @patches.around(F, "l1_loss")
    def l1_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batches = batches_in((args, kwargs))
        if not batches or argument(args, kwargs, 5, "weight") is None:
            return original(*args, **kwargs)
        return type(batches[0]).__torch_function__(original, (), args, kwargs)

    @patches.around(Tensor, "as_subclass")
    def as_subclass(original: Callable[..., Any], tensor: Tensor, cls: type[Tensor]) -> Any:
        """Return the tensor as an instance of `cls`.

        Of a batch: all rows, gathered; a view of the batch if `cls` is Tensor.
        """
        if not isinstance(tensor, BatchTensor):
            return original(tensor, cls)
        return tensor[...] if cls is Tensor else compute_whole(original, (tensor, cls), {})

    def whole_modules(function: type) -> AbstractContextManager[None]:
        """Split no inputs of modules that a Function calls, unless the Function is torch's or duoka's own."""
        ours = function.__module__.partition(".")[0] in ("torch", "duoka")
        return nullcontext() if ours else session.calls.computed_whole()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = their_apply.__get__(None, cls)

        def whole(*args: Any, **kwargs: Any) -> Any:
            return _whole_results(bound(*args, **kwargs))

        if not any(isinstance(value, BatchTensor) for value in args):
            with whole_modules(cls):
                return whole(*args, **kwargs)
        if cls.__module__.startswith(_KEEPING_ROWS):
            return _of_rows(bound, args)
        with whole_modules(cls):
            args = tuple(map(_unsharded, args))
            if not any(isinstance(value, BatchTensor) for value in args):
                return whole(*args, **kwargs)
            return compute_opaque(names_of_class(cls), whole, args, kwargs)

    their_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")
    patches.put(torch.autograd.Function, "apply", classmethod(apply))

    @patches.around(torch.autograd.function.BackwardCFunction, "apply")
    def apply_backward(original: Callable[..., Any], self: Any, *grads: Any) -> Any:
        with whole_modules(self._forward_cls):
            out = original(self, *grads)
            return gather_sharing(out) if batches_in(out) else out

    @patches.around(BackwardHook, "__init__")
    def hooks_of_module(original: Callable[..., Any], self: Any, module: Any, *hooks: Any) -> None:
        session.strategy.read_in_pass()
        original(self, module, *([returning_whole(hook) for hook in each] for each in hooks))

    patches.put(torch.autograd, "Variable", Variable)
    patches.put(nn.Parameter, "__new__", _parameter)
    patches.put(Tensor, "data", _Data(session.strategy))
    for name in ("real", "imag"):
        patches.put(Tensor, name, _ComplexPart(name))


_SPARSE = [f"sparse_{kind}_tensor" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")]
_KEEPING_ROWS = "torch.distributed.fsdp"  # its Functions return their tensors unchanged


def returning_whole(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Gather what a hook for whole gradients returns: of a module, or a tensor that every rank holds whole."""

    @wraps(hook)
    def whole(*args: Any) -> Any:
        return gather_sharing(hook(*args))

    return whole


def _whole_results(out: Any) -> Any:
    """Return what a Function returns; gather batches, which it has computed from others than its arguments (`ctx.x`).

    Autograd has made the Function's node that of the batch's wrapper, not of its rows.
    """
    if type(out) is Tensor or not batches_in(out):
        return out
    with WithoutTorchFunctions():
        return tree_map_only(BatchTensor, lambda batch: _straight_through(batch, batch.full_tensor()), out)


_straight_through: Any = StraightThrough.apply  # before `apply` is intercepted


def _unsharded(value: Any) -> Any:
    """Return a sharded parameter as its unsharded tensor, which names it: a Function may ask for its gradient."""
    unshard = getattr(value, "duoka_unsharded", None)
    if unshard is None:
        return value
    tensor = unshard()
    if tensor.requires_grad:
        tensor.duoka_parameter = value
    return tensor


def _of_rows(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a Function that returns its tensors unchanged to own rows."""
    out = function(*(value._local if isinstance(value, BatchTensor) else value for value in args))
    tensors = [value for value in args if isinstance(value, Tensor)]
    return tuple(
        BatchTensor(rows, was._spec) if isinstance(was, BatchTensor) else rows
        for rows, was in zip(out, tensors, strict=True)
    )


class _IsTensor(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor)


class Variable(metaclass=_IsTensor):
    """`torch.autograd.Variable`, which is a tensor since torch 0.4."""

    _execution_engine = backward_engine

    def __new__(cls, data: Any = None, requires_grad: bool = False, volatile: bool = False) -> Any:
        """Return the tensor itself, or one that shares its memory and requires a gradient."""
        if not requires_grad:
            return data
        return data.detach().requires_grad_()


_data: Any = Tensor.data


class _Data:
    """The attribute `data`; torch itself would set a plain tensor's to a batch's memory, of which there is none."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __get__(self, tensor: Tensor | None, owner: type) -> Any:
        if tensor is None:  # torch reads it of the class
            return _data
        # Writes to the data of a view of a sharded parameter must be counted, or they do not reach the shards.
        is_counted = type(tensor) is Tensor and self._strategy.counts_writes(tensor)
        return tensor.detach() if is_counted else _data.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        def share(data: Any) -> Tensor:
            if (data.dtype, data.device) != (tensor.dtype, tensor.device):
                self._strategy.note_type(tensor)
            _data.__set__(tensor, data)
            return tensor

        if isinstance(tensor, BatchTensor) or not isinstance(value, BatchTensor):
            share(value)
        else:
            compute_whole(share, (value.detach(),), {}, "torch.Tensor.data")


class _ComplexPart:
    """The attribute `real` or `imag`; torch's own setter copies the value without `__torch_function__`."""

    def __init__(self, name: str) -> None:
        self._original: Any = getattr(Tensor, name)

    def __get__(self, tensor: Tensor | None, owner: type) -> Any:
        return self._original if tensor is None else self._original.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        if batches_in((tensor, value)):
            self._original.__get__(tensor)[...] = value
        else:
            self._original.__set__(tensor, value)


_new_parameter = nn.Parameter.__new__


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """Create `nn.Parameter(batch)` of all rows, equal on every rank; it shares the memory of the batch."""
    if not isinstance(data, BatchTensor):
        return _new_parameter(cls, data, requires_grad)
    return compute_whole(partial(_new_parameter, cls), (data.detach(), requires_grad), {}, "nn.Parameter")
