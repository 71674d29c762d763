"""Module calls, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from duoka.hardware.vendors import TYPES
from duoka.plain.session import Session
from duoka.private.torch import CHECKPOINT, CHECKPOINT_GENERATOR, around_checkpoints
from duoka.view.modules.recomputing import on_rows
from duoka.view.support.hook_numbers import unnumbered


def install(session: Session) -> None:
    """Intercept `nn.Module.__call__` and `torch.utils.checkpoint.checkpoint`."""
    calls, make, is_compiling = session.calls, session.calls.call, torch.compiler.is_compiling

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # compiled code is given local rows
                return original(self, *args, **kwargs)
            return make(original, self, args, kwargs)

        return call

    def make_move(original: Callable[..., Any]) -> Callable[..., Any]:
        def move(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not session.calls.is_whole:
                session.strategy.prepare_model(self)
            return original(self, *args, **kwargs)

        return move

    session.patches.replace(nn.Module, "__call__", make_call)
    for name in ("to", "to_empty", *(name for name in TYPES if hasattr(nn.Module, name))):
        session.patches.replace(nn.Module, name, make_move)
    with unnumbered():
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            session.patches.at_end(register(lambda module, *_: calls.changed(module)).remove)
    if session.view.shares.exact:
        _keep_activations(session)
        return
    session.patches.replace(*CHECKPOINT, around_checkpoints(on_rows))


def _keep_activations(session: Session) -> None:
    """Run checkpointed functions without checkpointing, also where the script imported `checkpoint` before.

    A backward pass goes through all shares, so it is not known which share's activations to recompute.
    """
    kept = "activations are kept where the script checkpoints them: a backward pass goes through all shares"

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
