"""Module calls: the boundary stands around the outermost one. BatchNorm uses the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.func
import torch.nn.utils.stateless
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.view.batch import BatchTensor
from duoka.view.cut import Cut
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
            try:
                return boundary.call(original, self, args, kwargs)
            except Refused as error:
                session.view.refused(error)
                raise

        return call

    def make_register(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            boundary.seams.forget()
            return original(self, *args, **kwargs)

        return register

    session.patches.replace(nn.Module, "__call__", make_call)
    for name in HOOKS:
        session.patches.replace(nn.Module, name, make_register)

    def make_train(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(self: nn.Module, mode: bool = True) -> nn.Module:
            boundary.seams.modes_changed()
            return original(self, mode)  # type: ignore[no-any-return]

        return train

    def make_functional(original: Callable[..., Any]) -> Callable[..., Any]:
        def functional_call(*args: Any, **kwargs: Any) -> Any:
            before = boundary.open_all
            boundary.open_all = boundary.inside is None  # parameters that were computed: the rules know them
            try:
                return original(*args, **kwargs)
            finally:
                boundary.open_all = before

        return functional_call

    session.patches.replace(nn.Module, "train", make_train)
    for space in (torch.func, torch.nn.utils.stateless):
        session.patches.replace(space, "functional_call", make_functional)
    one_device = F.batch_norm

    def make_script(original: Callable[..., Any]) -> Callable[..., Any]:
        def script(*args: Any, **kwargs: Any) -> Any:
            ours, F.batch_norm = F.batch_norm, one_device  # TorchScript reads the source of what is called
            try:
                with boundary.computed_whole():
                    return original(*args, **kwargs)
            finally:
                F.batch_norm = ours

        return script

    if session.plan.batch_norm == "whole":
        session.patches.replace(F, "batch_norm", lambda original: _batch_norm(original, session))
    session.patches.replace(
        torch.utils.checkpoint,
        "checkpoint",
        lambda original: lambda function, *args, **kwargs: original(boundary.checkpointed(function), *args, **kwargs),
    )
    for name in ("script", "trace"):
        session.patches.replace(torch.jit, name, make_script)


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
        found = _rows_of(input, session) if training else None
        if found is None:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
        rows, cut = found
        counts = _counts(cut.sizes, rows.numel() // rows.shape[1] // cut.rows, rows.device)
        out = whole_batch_norm(rows, running_mean, running_var, weight, bias, momentum, eps, counts, session.ranks)
        return BatchTensor(out, input._spec) if isinstance(input, BatchTensor) else out

    return batch_norm


def _rows_of(values: Tensor, session: Session) -> tuple[Tensor, Cut] | None:
    """This rank's rows and their cut, inside of a boundary or of a batch tensor; None where all rows are here."""
    if isinstance(values, BatchTensor):
        spec = values._spec
        return (values._local, spec.cut) if (spec.dim, spec.outer) == (0, 1) else None
    inside = session.boundary.inside
    return None if inside is None or inside.cut is None else (values, inside.cut)


@lru_cache(maxsize=256)
def _counts(sizes: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """How many values a channel has on each rank."""
    return torch.tensor(sizes, device=device) * each
