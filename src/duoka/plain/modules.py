"""Module calls: the boundary stands around the outermost one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.func
import torch.nn.utils.stateless
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.private.torch import CHECKPOINT, CHECKPOINT_GENERATOR, PAD_PACKED, around_checkpoints

HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def install(session: Session) -> None:
    """Intercept `nn.Module.__call__`, and what changes a call: hooks, modes, other parameters, checkpoints."""
    boundary = session.boundary

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the boundary is outside of compiled code
                return original(self, *args, **kwargs)
            try:
                return boundary.call(original, self, args, kwargs)
            except Exception as error:
                if boundary.inside is None or isinstance(error, Refused):
                    session.view.raised(error)
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

    def make_padding(original: Callable[..., Any]) -> Callable[..., Any]:
        def pad_packed_sequence(*args: Any) -> Any:
            *others, length = args
            return original(*others, boundary.longest(length))

        return pad_packed_sequence

    session.patches.replace(*PAD_PACKED, make_padding)
    session.patches.replace(nn.Module, "train", make_train)
    for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
        session.patches.hook(register(lambda module, *_: boundary.seams.given(module)))
    for space in (torch.func, torch.nn.utils.stateless):
        session.patches.replace(space, "functional_call", make_functional)
    if session.view.own.exact:
        _keep_activations(session)
        return
    session.patches.replace(*CHECKPOINT, around_checkpoints(boundary.checkpoint))


def _keep_activations(session: Session) -> None:
    """Checkpointed functions are run as they are, also where the script has taken `checkpoint` out of torch before.

    A backward pass goes through all shares, and could not tell whose activations are to be computed anew.
    """
    kept = "activations are kept where the script checkpoints them: --strategy exact goes back through all shares"

    def make_generator(original: Callable[..., Any]) -> Callable[..., Any]:
        def nothing_before_or_after(*args: Any, **kwargs: Any) -> Iterator[None]:
            session.view.say(kept)
            yield

        return nothing_before_or_after

    class Kept:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            session.view.say(kept)
            return function(*args)

    session.patches.replace(*CHECKPOINT_GENERATOR, make_generator)
    session.patches.put(torch.utils.checkpoint, "CheckpointFunction", Kept)
