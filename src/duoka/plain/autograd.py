"""Backward passes: when one ends, the gradients of parameters are the whole batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.plain.session import Session
from duoka.view.batch import batches_in
from duoka.view.site import user_line


def install(session: Session) -> None:
    """Intercept `torch.autograd.backward` (also behind `loss.backward()`) and `torch.autograd.grad`."""

    def make_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            with session.strategy.backward(user_line()), session.boundary.recomputing():
                return original(*args, **kwargs)

        return backward

    def make_grad(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(*args: Any, **kwargs: Any) -> Any:
            outputs, inputs = _first_two(args, kwargs)
            with session.boundary.recomputing():
                found = original(*args, **kwargs)
            inside = session.boundary.inside
            if batches_in((outputs, inputs)) or (inside is not None and not inside.recomputing):
                return found  # the rule for batches has seen to it, or these are rows
            if torch._C._functorch.maybe_current_level() is not None:
                return found  # what torch.func is given is whole
            if isinstance(inputs, dict):
                return {name: _of_all_ranks(found[name], inputs[name], session) for name in inputs}
            inputs = [inputs] if isinstance(inputs, Tensor) else inputs
            return tuple(_of_all_ranks(one, of, session) for one, of in zip(found, inputs, strict=True))

        return grad

    session.patches.replace(torch.autograd, "backward", make_backward)
    session.patches.replace(torch.autograd, "grad", make_grad)


def _first_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    outputs = args[0] if args else kwargs["outputs"]
    return outputs, args[1] if len(args) > 1 else kwargs["inputs"]


def _of_all_ranks(found: Tensor | None, of: Any, session: Session) -> Tensor | None:
    """A leaf met rows as it is, so each rank found a part of its gradient."""
    if found is None or not isinstance(of, Tensor) or not of.is_leaf:
        return found
    return session.view.all_sum(found) / session.ranks.world_size
