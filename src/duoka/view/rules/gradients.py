"""Batches as leaves: adversarial examples, gradient penalties, saliency.

A gradient arrives at a rank's rows world_size times too large (the objective is a sum over ranks' copies of the
loss), so a batch that asks for a gradient divides it on arrival: `x.grad` is then true, and may be written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duoka.view.batch import BatchTensor, Rule
from duoka.view.rules.lookup import Function


def requires_grad_(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.requires_grad_()` and `x.requires_grad = True`."""
    batch = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    fresh = wanted and not batch._local.requires_grad
    batch._local.requires_grad_(wanted)
    if fresh:
        size = batch._spec.view.ranks.world_size
        _register_hook(batch._local, lambda grad: grad / size)
    return batch


def set_requires_grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The attribute."""
    requires_grad_(func, args, kwargs)


def get_grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.grad`: for a leaf the same memory at every reading; a computed batch's (`retain_grad`) is divided here."""
    batch = args[0]
    grad = batch._local.grad
    if grad is None:
        return None
    return BatchTensor(grad if batch._local.is_leaf else grad / batch._spec.view.ranks.world_size, batch._spec)


def set_grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x.grad = None`, or a batch or whole tensor of the same shape."""
    batch, grad = args
    if isinstance(batch, BatchTensor):
        rows = grad._local if isinstance(grad, BatchTensor) else grad
        batch._local.grad = batch._spec.own(rows) if isinstance(rows, Tensor) and rows is grad else rows
    else:  # a replicated tensor is given a batch as gradient
        batch.grad = grad.full_tensor()


def backward(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`y.backward(gradient)` of a batch: every rank adds its own rows' part."""
    gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
    inputs = kwargs.pop("inputs", None)
    backward_of_several(
        func, (args[0], gradient, *args[2:]), kwargs if inputs is None else {**kwargs, "inputs": inputs}
    )


def backward_of_several(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.backward(tensors, grad_tensors)`."""
    tensors = _listed(args[0] if args else kwargs.pop("tensors"))
    given = args[1] if len(args) > 1 else kwargs.pop("grad_tensors", None)
    weights = [None] * len(tensors) if given is None else _listed(given)
    for tensor, weight in zip(tensors, weights, strict=True):
        if isinstance(tensor, BatchTensor) and weight is None:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
    own = [_weight_of_rows(weight, tensor) for weight, tensor in zip(weights, tensors, strict=True)]
    torch.autograd.backward([_own(tensor) for tensor in tensors], own, *args[2:], **kwargs)


def _own(tensor: Tensor) -> Tensor:
    return tensor._local if isinstance(tensor, BatchTensor) else tensor


def _weight_of_rows(weight: Any, tensor: Tensor) -> Any:
    """Rows count once over all ranks, so their weights are raised by world_size (module docstring)."""
    if not isinstance(tensor, BatchTensor) or weight is None:
        return weight
    return _rows_of(weight, tensor) * tensor._spec.view.ranks.world_size


def _rows_of(gradient: Tensor, batch: BatchTensor) -> Tensor:
    return gradient._local if isinstance(gradient, BatchTensor) else batch._spec.own(gradient)


def grad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` where outputs or inputs are batches.

    Outputs that are rows count once over all ranks, so their weights are raised by world_size: then gradients
    of rows come divided by their own hooks or here, and gradients of replicated tensors are summed.
    """
    outputs, inputs = (
        _listed(args[0] if args else kwargs.pop("outputs")),
        _listed(args[1] if len(args) > 1 else kwargs.pop("inputs")),
    )
    given = args[2] if len(args) > 2 else kwargs.pop("grad_outputs", None)
    weights = [None] * len(outputs) if given is None else _listed(given)
    view = next(leaf._spec.view for leaf in (*outputs, *inputs) if isinstance(leaf, BatchTensor))
    own_weights = [_weight_of_rows(weight, output) for output, weight in zip(outputs, weights, strict=True)]
    own = [[_own(tensor) for tensor in tensors] for tensors in (outputs, inputs)]
    found = _torch_grad(*own, own_weights, *args[3:], **kwargs)
    return tuple(_true_gradient(one, of, view) for one, of in zip(found, inputs, strict=True))


# Plain scripts get other ones, which ask these rules.
_torch_grad: Any = torch.autograd.grad
_register_hook: Any = Tensor.register_hook
_asks_for_grad: Any = Tensor.requires_grad
_grad: Any = Tensor.grad


def _true_gradient(found: Tensor | None, of: Tensor, view: Any) -> Tensor | None:
    if found is None:
        return None
    if isinstance(of, BatchTensor):
        hooked = of._local.is_leaf  # divided on arrival
        return BatchTensor(found if hooked else found / view.ranks.world_size, of._spec)
    return found if not of.is_leaf else view.all_sum(found) / view.ranks.world_size


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def register_hook(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.register_hook(f)`: f sees, and may return, the whole batch's true gradient."""
    batch, hook = args
    size = batch._spec.view.ranks.world_size
    scale = 1 if batch._local.is_leaf else size

    def rows_hook(grad: Tensor) -> Tensor | None:
        out = hook(BatchTensor(grad / scale, batch._spec))
        return None if out is None else _rows_of(out, batch) * scale

    return _register_hook(batch._local, rows_hook)


RULES: dict[Function, Rule] = {
    Tensor.requires_grad_: requires_grad_,
    _asks_for_grad.__set__: set_requires_grad,
    _grad.__get__: get_grad,
    _grad.__set__: set_grad,
    Tensor.backward: backward,
    torch.autograd.backward: backward_of_several,
    _register_hook: register_hook,
    _torch_grad: grad,
}
