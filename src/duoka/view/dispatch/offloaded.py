"""Functions of offloaded parameters: rows stay in the host's memory, whatever device a call asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duoka.hardware import accelerator
from duoka.private.torch import parse_to, tree_leaves
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, may_write
from duoka.view.view import ParameterView

_TO, _CPU = Tensor.to, Tensor.cpu  # themselves: scripts and interceptions wrap them


def asked_device(func: Function, args: Args, kwargs: Kwargs) -> torch.device | None:
    """Return the device on which a function is asked to give its result; None if it is asked for none."""
    if func is _TO:
        named = {name: value for name, value in kwargs.items() if name != "memory_format"}
        device: torch.device | None = parse_to(*args[1:], **named)[0]
        return device
    if func is _CPU:
        return torch.device("cpu")
    moves = func in accelerator.MOVES
    asked = args[1] if moves and len(args) > 1 else kwargs.get("device")
    if asked is None:
        return torch.empty(0, device=accelerator.kind()).device if moves else None
    return torch.device(asked)


def reads_beside(device: torch.device, func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a function computes with rows of the host beside tensors of another device, and writes none."""
    if device.type == "cpu" or may_write(func, kwargs) or BatchTensor.traits_of(func).unrecorded:
        return False
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(leaf.dim() > 0 and leaf.device == device for leaf in tensors if not isinstance(leaf, BatchTensor))


def on_host(out: Any) -> Any:
    """Return a copy of offloaded rows that the script moves to the host, where they are already."""
    if not isinstance(out, BatchTensor):
        return out
    view = out._spec.view
    assert isinstance(view, ParameterView)
    return BatchTensor(out._local.clone(), replace(out._spec, view=view.on_host), out._meta.strides)


def staying(func: Function, args: Args, kwargs: Kwargs, device: torch.device) -> tuple[Any, ...]:
    """Return the call whose result is on `device`, that of the rows."""
    if func not in (_TO, _CPU, *accelerator.MOVES):
        return func, args, {**kwargs, "device": device}
    dtype = parse_to(*args[1:], **kwargs)[1] if func is _TO else None
    return _TO, (args[0], device, dtype or args[0].dtype), {"copy": True} if kwargs.get("copy") else {}
