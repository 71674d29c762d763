"""What a module is made of, where that decides how it is run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from duoka.private.torch import AnyBatchNorm, hooks_on, hooks_on_all_modules, is_compiled_call


def is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile has to do with it."""
    return type(part).__name__ == "OptimizedModule" or is_compiled_call(part)


def has_batch_norm(module: nn.Module) -> bool:
    """BatchNorm that takes a batch's statistics."""
    return any(isinstance(part, AnyBatchNorm) and part.training for part in module.modules())


def is_scripted(module: nn.Module) -> bool:
    """TorchScript in it: BatchNorm and dropout inside of that ask nobody."""
    return any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of it (torch's DTensor)."""
    return hasattr(tensor, "device_mesh")


def holds_shards(module: nn.Module) -> bool:
    """Whether any of its parameters is sharded."""
    return any(map(is_sharded, module.parameters()))


def is_scripts_own(hook: Any) -> bool:
    """Whether a hook is neither torch's nor duoka's."""
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "duoka."))


def has_hooks(module: nn.Module) -> bool:
    """Hooks of the script's own, in the module or its parts: they must see batches, not rows."""
    if hooks_on_all_modules():
        return True
    return any(is_scripts_own(hook) for part in module.modules() for hook in hooks_on(part))
