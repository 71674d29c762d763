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
    compiling = torch.compile

    def of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not batches_in((args, kwargs)):
                return function(*args, **kwargs)
            with session.calls.computed_whole():
                return compute_whole(function, args, kwargs)

        return called

    patches = session.patches

    @patches.around(torch, "compile", "vmap")
    @patches.around(torch.func, *TRANSFORMS)
    def transform(original: Callable[..., Any], function: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = original(function, *args, **kwargs)
        if original is compiling and session.view.has_sharded:
            run_uncompiled(session)
        return made if isinstance(made, nn.Module) or not callable(function) else of_all_rows(made)

    @patches.around(torch.func, *APPLIED)
    def apply(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = of_all_rows(original)(*args, **kwargs)
        return tuple(of_all_rows(part) if callable(part) else part for part in parts)

    def call_scripted(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if not batches_in((args, kwargs)):
            return original(self, *args, **kwargs)
        with session.calls.computed_whole():
            return compute_opaque((self.name,), functools.partial(original, self), args, kwargs)

    for kind in SCRIPTED:
        patches.around(kind, "__call__")(call_scripted)
    patches.replace(torch, "cond", of_all_rows)
