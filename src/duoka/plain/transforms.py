"""Functions of functions (torch.compile, vmap, torch.func, TorchScript), and gradcheck, past `__torch_function__`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.func
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.private.torch import FRAMES_UP, SCRIPTED, before_calls, parameters_in, tree_map_only, version_of
from duoka.system.user_code import after_import, user_line
from duoka.view.dispatch.own_rows import compute_opaque
from duoka.view.tensor.batch import BatchTensor, batches_in, gather_all
from duoka.view.whole import compute_whole

TRANSFORMS = ("vmap", "grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "functionalize")
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

    def of_functorch(functorch: ModuleType) -> None:
        patches.around(functorch, *TRANSFORMS, "make_fx")(transform)
        patches.around(functorch, "vjp", "jvp")(apply)

    after_import("functorch", of_functorch)  # the names that they had before torch 2.0
    after_import("torch.fx.experimental.proxy_tensor", lambda module: patches.around(module, "make_fx")(transform))

    @patches.around(torch.autograd, "gradcheck", "gradgradcheck")  # which call operators of their own on the results
    def check(original: Callable[..., Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def whole(*inputs: Any) -> Any:
            return gather_all(func(*inputs))

        args, kwargs = tree_map_only(BatchTensor, _example, (args, kwargs))
        with session.calls.computed_whole():
            return original(whole, *args, **kwargs)

    def call_scripted(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if not batches_in((args, kwargs)):
            return original(self, *args, **kwargs)
        with session.calls.computed_whole():
            return compute_opaque((self.name,), functools.partial(original, self), args, kwargs)

    for kind in SCRIPTED:
        patches.around(kind, "__call__")(call_scripted)
    patches.replace(torch, "cond", of_all_rows)


Update = Callable[[], None]


def install_scripting(session: Session) -> None:
    """Intercept `torch.jit.script`, `trace` and `save`, and `torch.export.export`, which read torch's own functions.

    A module that is made of a sharded one has whole copies of its parameters. They get the new values before the
    module is called or saved. The gradient of a copy is an error, as the sharded parameter would not get it.
    """
    updates: WeakKeyDictionary[nn.Module, Update] = WeakKeyDictionary()

    @session.patches.around(torch.jit, "script", "trace")
    def script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if original.__name__ == "script":  # it looks up names in its caller's frame, now two further up
            kwargs[FRAMES_UP] = kwargs.get(FRAMES_UP, 0) + 2
        args, kwargs = tree_map_only(BatchTensor, _example, (args, kwargs))  # for `trace`
        with (
            session.patches.functions_put_back(),
            session.calls.computed_whole(),
            _whole_copies(args[0] if args else None) as copies,
        ):
            made = original(*args, **kwargs)
        if copies:
            updates[made] = update = _update(copies)
            before_calls(made, update)
        return made

    @session.patches.around(torch.export, "export")
    def export(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(BatchTensor, _example, (args, kwargs))
        if isinstance(module, nn.Module) and batches_in(list(module.parameters())):
            raise Refused(
                f"{user_line()}: torch.export cannot read a sharded model; save its state dict and export a model "
                "that loads it in another script, or use another strategy"
            )
        with session.patches.functions_put_back(), session.calls.computed_whole():
            return original(module, *args, **kwargs)

    @session.patches.around(torch.jit, "save")
    @session.patches.around(torch.jit.ScriptModule, "save")
    @session.patches.around(torch.jit.RecursiveScriptModule, "save")  # type: ignore[attr-defined]
    def save(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        updates.get(module, lambda: None)()
        return original(module, *args, **kwargs)


def _example(batch: BatchTensor) -> Any:
    if getattr(batch, "duoka_unsharded", None) is not None:  # a parameter
        return batch
    return batch.full_tensor().detach().to(batch.device).requires_grad_(batch._shares[0]._local.requires_grad)


@contextmanager
def _whole_copies(module: Any) -> Iterator[dict[BatchTensor, nn.Parameter]]:
    """Put whole copies in place of the sharded parameters of a module, if it is one, while the context is open."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    tables: list[dict[str, Any]] = [parameters_in(part) for part in parts]
    replaced = [(table, *item) for table in tables for item in table.items() if isinstance(item[1], BatchTensor)]
    copies = {sharded: _copy(sharded) for _, _, sharded in replaced}
    for table, name, sharded in replaced:
        table[name] = copies[sharded]
    try:
        yield copies
    finally:
        for table, name, sharded in replaced:
            table[name] = sharded


def _copy(sharded: BatchTensor) -> nn.Parameter:
    copy = nn.Parameter(sharded.full_tensor().detach().clone(), sharded.requires_grad)

    def refuse(gradient: Tensor) -> None:
        raise Refused(
            f"{user_line()}: a module of TorchScript that was made of a sharded model has copies of its parameters, "
            "which cannot be trained; train the model itself, or use another strategy"
        )

    if copy.requires_grad:
        copy.register_hook(refuse)
    return copy


def _update(copies: dict[BatchTensor, nn.Parameter]) -> Update:
    """Return a function that gives the copies the new values, which all ranks must call."""

    def versions() -> list[tuple[int, int]]:
        return [(id(sharded._rows), version_of(sharded._rows)) for sharded in copies]

    known = versions()

    def update() -> None:
        if known == (now := versions()):
            return
        known[:] = now
        with torch.no_grad():
            for sharded, copy in copies.items():
                copy.copy_(sharded.full_tensor())

    return update
