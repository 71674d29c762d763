"""Module calls, of `nn.DataParallel` and `duoka.predict` too, and activation checkpointing.

A script's `nn.DataParallel` calls its module directly, as duoka shares batches out itself; the class's name,
`.module` and the `module.` in its state dict stay, and inputs are moved to the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import getclosurevars, isfunction
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from duoka.errors import Refused
from duoka.hardware import accelerator
from duoka.hardware.vendors import TYPES
from duoka.inference.replicas import Replica
from duoka.plain.session import Session
from duoka.private.torch import CHECKPOINT, CHECKPOINT_GENERATOR, around_checkpoints, tree_leaves, tree_map_only
from duoka.system.user_code import user_line
from duoka.view.aliased import version
from duoka.view.generators import random_marks
from duoka.view.modules.recomputing import on_rows
from duoka.view.originals import unnumbered


def install(session: Session) -> None:
    """Intercept `nn.Module.__call__` and `torch.utils.checkpoint.checkpoint`."""
    calls, make, is_compiling = session.calls, session.calls.call, torch.compiler.is_compiling

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # compiled code is given local rows
                return original(self, *args, **kwargs)
            return make(original, self, args, kwargs)

        return call

    session.patches.replace(nn.Module, "__call__", make_call)

    @session.patches.around(nn.Module, "to", "to_empty", *(name for name in TYPES if hasattr(nn.Module, name)))
    def move(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not session.calls.is_whole:
            session.strategy.prepare_model(self)
        return original(self, *args, **kwargs)

    with unnumbered():
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            session.patches.at_end(register(lambda module, *_: calls.changed(module)).remove)
    if session.view.shares.exact:
        _keep_activations(session)
        return
    session.patches.replace(*CHECKPOINT, around_checkpoints(partial(on_rows, session.view)))


def _keep_activations(session: Session) -> None:
    """Run checkpointed functions without checkpointing, also where the script imported `checkpoint` before.

    A backward pass goes through all shares, so it is not known which share's activations to recompute. On one device
    a recomputation writes the function's buffers and counters and, without `preserve_rng_state`, draws random numbers
    again, so a function that does is refused.
    """

    @contextmanager
    def kept(function: Any, preserve: bool) -> Iterator[None]:
        session.view.say(
            "activations are kept where the script checkpoints them: a backward pass goes through all shares"
        )
        before = _state(function) if torch.is_grad_enabled() else {}
        marks = None if preserve or not torch.is_grad_enabled() else random_marks()
        yield
        after, does = _state(function) if before else {}, ""
        if any(key not in after or _is_changed(value, after[key]) for key, value in before.items()):
            does = "writes buffers or counters of a module (BatchNorm's statistics?)"
        elif marks is not None and marks != random_marks():
            does = "draws random numbers (preserve_rng_state=False)"
        if does:
            error = Refused(
                f"the function that {user_line()} checkpoints {does}, which one device does again in the backward "
                "pass; with --strategy exact do not checkpoint it, or use ddp"
            )
            session.view.raised(error)
            raise error

    @session.patches.around(*CHECKPOINT_GENERATOR)
    def around(original: object, function: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        with kept(function, preserve):
            yield

    class Kept:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            asks = any(isinstance(value, Tensor) and value.requires_grad for value in args)
            # torch's own has no gradients, of weights neither, if no input asks for one.
            with kept(function, preserve), nullcontext() if asks else torch.no_grad():
                return function(*args)

    session.patches.put(torch.utils.checkpoint, "CheckpointFunction", Kept)


def _state(function: Any) -> dict[tuple[nn.Module, str], Any]:
    """Return the buffers, with copies, and the numbers that are attributes, of modules to which a function refers."""
    function = getattr(function, "func", function)  # of functools.partial
    values = [getattr(function, "__self__", function)]
    if isfunction(function):
        variables = getclosurevars(function)
        values += [*variables.nonlocals.values(), *variables.globals.values()]
    modules = {part for value in tree_leaves(values) if isinstance(value, nn.Module) for part in value.modules()}
    state: dict[tuple[nn.Module, str], Any] = {}
    for part in modules:
        for name, buffer in part.named_buffers(recurse=False):
            state[part, name] = buffer, version(buffer), buffer.detach().clone()  # `data` writes without counting
        state |= {(part, name): value for name, value in vars(part).items() if isinstance(value, (int, float))}
    return state


def _is_changed(before: Any, after: Any) -> bool:
    if not isinstance(before, tuple) or not isinstance(after, tuple):
        return bool(before != after)
    same = before[0] is after[0] and before[1] == after[1]
    return not same or not torch.equal(before[2].nan_to_num(), after[2].nan_to_num())


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """A `nn.DataParallel` that calls its module."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        nn.Module.__init__(self)
        self._device = accelerator.best()
        self.device_ids = [0] if self._device.type != "cpu" else []
        self.module, self.dim = module.to(self._device) if self.device_ids else module, dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.device_ids:
            inputs, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to(self._device), (inputs, kwargs))
        return self.module(*inputs, **kwargs)


def replace_data_parallel(session: Session) -> None:
    """Replace `nn.DataParallel`."""
    for space in (nn, nn.parallel):
        session.patches.put(space, "DataParallel", DataParallel)


def compute_predictions_whole(session: Session) -> None:
    """Do not shard the batches of `duoka.predict`."""

    @session.patches.around(Replica, "compute")
    def compute(original: Callable[..., Any], self: Replica, batch: Any) -> Any:
        with session.calls.computed_whole():
            return original(self, batch)
