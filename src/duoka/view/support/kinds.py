"""What a module is made of, where that decides how it is run."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from duoka.private.torch import is_compiled_call


def is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile has to do with it."""
    return type(part).__name__ == "OptimizedModule" or is_compiled_call(part)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of it (torch's DTensor)."""
    return hasattr(tensor, "device_mesh")


def holds_shards(module: nn.Module) -> bool:
    """Whether any of its parameters is sharded."""
    return any(map(is_sharded, module.parameters()))


def is_scripts_own(hook: Any) -> bool:
    """Whether a hook is neither torch's nor duoka's."""
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "duoka."))
