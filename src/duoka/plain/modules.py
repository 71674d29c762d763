"""Module calls: the boundary stands around the outermost one. BatchNorm uses the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.plain.session import Session
from duoka.view.norm import whole_batch_norm

HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def install(session: Session) -> None:
    """Intercept `nn.Module.__call__`, the registering of hooks, and `F.batch_norm`."""
    boundary = session.boundary

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the boundary is outside of compiled code
                return original(self, *args, **kwargs)
            return boundary.call(original, self, args, kwargs)

        return call

    def make_register(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            boundary.seams.forget()
            return original(self, *args, **kwargs)

        return register

    session.patches.replace(nn.Module, "__call__", make_call)
    for name in HOOKS:
        session.patches.replace(nn.Module, name, make_register)
    if session.plan.batch_norm == "whole":
        session.patches.replace(F, "batch_norm", lambda original: _batch_norm(original, session))


def _batch_norm(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def batch_norm(
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        inside = session.boundary.inside
        if not training or inside is None or inside.cut is None:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
        each = input.numel() // input.shape[1] // inside.cut.rows
        counts = torch.tensor(inside.cut.sizes, device=input.device) * each
        return whole_batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, counts, session.ranks)

    return batch_norm
