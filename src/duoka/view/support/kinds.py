"""Kinds of modules, tensors and hooks that are treated differently."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from duoka.private.torch import is_compiled_call


def is_compiled(part: nn.Module) -> bool:
    """Return True for a compiled module."""
    return type(part).__name__ == "OptimizedModule" or is_compiled_call(part)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for torch's DTensor, of which each rank holds a part."""
    return hasattr(tensor, "device_mesh")


def holds_shards(module: nn.Module) -> bool:
    """Return True if any parameter is sharded."""
    return any(map(is_sharded, module.parameters()))


def is_scripts_own(hook: Any) -> bool:
    """Return True if a hook is neither torch's nor duoka's."""
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "duoka."))
