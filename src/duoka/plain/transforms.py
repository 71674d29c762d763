"""Functions made of functions (torch.compile, vmap, cond, torch.func, TorchScript), past `__torch_function__`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.func
from torch import nn

from duoka.plain.session import Session
from duoka.private.torch import SCRIPTED
from duoka.view.dispatch.own_rows import compute_opaque
from duoka.view.dispatch.whole import compute_whole
from duoka.view.tensor.batch import batches_in

TRANSFORMS = ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian")
APPLIED = ("vjp", "jvp", "linearize")  # take the function and its arguments in one call


def run_uncompiled(session: Session) -> None:
    """Run compiled modules and functions uncompiled from now on, as parameters are sharded."""
    torch.compiler.set_stance("force_eager")
    session.view.say("strategy fsdp: what is compiled runs uncompiled, as parameters are gathered and released")


def install(session: Session) -> None:
    """Make transformed functions compute all rows. A compiled module stays compiled (view/modules/compiled.py)."""

    def of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not batches_in((args, kwargs)):
                return function(*args, **kwargs)
            with session.calls.computed_whole():
                return compute_whole(function, args, kwargs)

        return called

    def make_transform(original: Callable[..., Any]) -> Callable[..., Any]:
        def transform(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = original(function, *args, **kwargs)
            if original is compiling and session.view.has_sharded:
                run_uncompiled(session)
            return made if isinstance(made, nn.Module) or not callable(function) else of_all_rows(made)

        return transform

    def make_applied(original: Callable[..., Any]) -> Callable[..., Any]:
        of_rows = of_all_rows(original)

        def applied(*args: Any, **kwargs: Any) -> Any:
            return tuple(of_all_rows(part) if callable(part) else part for part in of_rows(*args, **kwargs))

        return applied

    def make_scripted(original: Callable[..., Any]) -> Callable[..., Any]:
        def scripted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not batches_in((args, kwargs)):
                return original(self, *args, **kwargs)
            with session.calls.computed_whole():
                return compute_opaque((self.name,), functools.partial(original, self), args, kwargs)

        return scripted

    compiling = torch.compile
    session.patches.replace(torch, "compile", make_transform)
    for kind in SCRIPTED:
        session.patches.put(kind, "__call__", make_scripted(kind.__call__))
    session.patches.replace(torch, "vmap", make_transform)
    session.patches.replace(torch, "cond", of_all_rows)
    for name in TRANSFORMS:
        session.patches.replace(torch.func, name, make_transform)
    for name in APPLIED:
        session.patches.replace(torch.func, name, make_applied)
