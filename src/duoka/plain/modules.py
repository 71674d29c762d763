"""Module calls, of `nn.DataParallel` and `duoka.predict` too, and activation checkpointing.

A script's `nn.DataParallel` calls its module directly, as duoka shares batches out itself; the class's name,
`.module` and the `module.` in its state dict stay, and inputs are moved to the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from duoka.hardware import accelerator
from duoka.hardware.vendors import TYPES
from duoka.inference.replicas import Replica
from duoka.plain.session import Session
from duoka.private.torch import CHECKPOINT, around_checkpoints, tree_map_only
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

    def checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return on_rows(session.view, checkpoint, calls.as_now(function), args, kwargs)

    session.patches.replace(*CHECKPOINT, around_checkpoints(checkpointed))


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
