"""Backward passes: average gradients of parameters, so that they are the whole batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from duoka.plain.session import Session
from duoka.private.torch import transform_level, tree_flatten, tree_unflatten
from duoka.system.user_code import user_line
from duoka.view.rules.gradients import OF_BACKWARD, OF_GRAD, uses, whole_gradients
from duoka.view.support.transforms import is_tracing
from duoka.view.tensor.batch import batches_in


def install(session: Session) -> None:
    """Intercept `torch.autograd.backward` (also behind `loss.backward()`) and `torch.autograd.grad`."""

    def make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            batches = batches_in((args, kwargs))
            if batches:  # torch 2.10 does not call their __torch_function__; their rule calls this again, with rows
                return handle_torch_function(original, batches, *args, **kwargs)
            args, kwargs = (), dict(zip(OF_BACKWARD, args, strict=False)) | kwargs
            if kwargs.get("inputs") is not None:
                inputs = [kwargs["inputs"]] if isinstance(kwargs["inputs"], Tensor) else kwargs["inputs"]
                kwargs["inputs"] = [use for leaf in inputs for use in uses(leaf, session.view)]
            try:
                with session.strategy.backward(user_line()):
                    return original(*args, **kwargs)
            except Exception as error:
                session.view.raised(error)
                raise

        return backward

    def make_grad(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            how = dict(zip(OF_GRAD, args, strict=False)) | kwargs
            if is_tracing():  # torch.compile makes a graph of the backward pass, of this rank's rows
                return original(*args, **kwargs)
            if how.get("is_grads_batched") and transform_level() is None:
                return _one_by_one(grad, how)
            outputs, inputs = how.pop("outputs"), how.pop("inputs")
            # Batches have a rule of their own; torch.func is given whole tensors.
            if batches_in((outputs, inputs)) or transform_level() is not None:
                return original(*args, **kwargs)
            if isinstance(inputs, dict):
                gradients = whole_gradients(outputs, list(inputs.values()), session.view, **how)
                return dict(zip(inputs, gradients, strict=True))
            inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            return whole_gradients(outputs, inputs, session.view, **how)

        return grad

    session.patches.replace(torch.autograd, "backward", make_backward)
    session.patches.replace(torch.autograd, "grad", make_grad)


def _one_by_one(grad: Callable[..., Any], how: dict[str, Any]) -> Any:
    """Compute `is_grads_batched` with one pass for each: torch cannot vmap over communication in the graph."""
    weights, shape = tree_flatten(how["grad_outputs"])
    count = next(len(weight) for weight in weights if weight is not None)
    gradients = []
    for at in range(count):
        weighing = tree_unflatten([None if weight is None else weight[at] for weight in weights], shape)
        retain = how.get("retain_graph") or how.get("create_graph") or at < count - 1
        gradients.append(grad(**{**how, "grad_outputs": weighing, "is_grads_batched": False, "retain_graph": retain}))
    if isinstance(how["inputs"], dict):
        return {name: _stacked([gradient[name] for gradient in gradients]) for name in gradients[0]}
    return tuple(map(_stacked, zip(*gradients, strict=True)))


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = next((part for part in parts if part is not None), None)
    return there if there is None else torch.stack([torch.zeros_like(there) if p is None else p for p in parts])
