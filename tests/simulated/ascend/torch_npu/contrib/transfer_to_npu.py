"""Simulated: a script that was written for CUDA runs on NPUs after `from torch_npu.contrib import transfer_to_npu`.

As Huawei's does, it puts torch.npu in the place of torch.cuda, and functions that take a device between a script and
torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch._dynamo  # looks for what torch.cuda has
import torch.distributed
import torch.utils._device

CREATE = (
    "arange as_tensor empty empty_like full full_like linspace load ones ones_like rand rand_like randint randn"
    " randn_like randperm tensor zeros zeros_like autocast Generator set_default_device"
)
METHODS = "new_empty new_full new_ones new_tensor new_zeros to pin_memory"
OF_DEVICES = "get_device_name get_device_properties set_device synchronize mem_get_info memory_allocated"
OF_DEVICES += " max_memory_allocated memory_reserved reset_peak_memory_stats"
WORDS = ("device", "device_type", "map_location", "device_id")


def _as_npu(value: Any, numbers: bool = False) -> Any:
    if isinstance(value, str):
        return value.replace("cuda", "npu")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu" if value.index is None else f"npu:{value.index}")
    if isinstance(value, int) and not isinstance(value, bool) and numbers:
        return f"npu:{value}"
    return {_as_npu(key): _as_npu(device) for key, device in value.items()} if isinstance(value, dict) else value


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        words = {name: _as_npu(value, True) if name in WORDS else value for name, value in kwargs.items()}
        return function(*(_as_npu(arg, function.__name__ == "to") for arg in args), **words)

    return call


def _wrap(space: Any, names: str) -> None:
    for name in names.split():
        setattr(space, name, _wrapped(getattr(space, name)))


torch.cuda = torch.npu  # type: ignore[attr-defined]
_wrap(torch.cuda, OF_DEVICES)
_wrap(torch.cuda.device, "__init__")
_wrap(torch, CREATE)
_wrap(torch.Tensor, METHODS)
_wrap(torch.nn.Module, "to to_empty")
_wrap(torch.nn.parallel.DistributedDataParallel, "__init__")
_wrap(torch.utils._device.DeviceContext, "__init__")
torch.Tensor.cuda, torch.Tensor.is_cuda = torch.Tensor.npu, torch.Tensor.is_npu  # type: ignore
torch.nn.Module.cuda = torch.nn.Module.npu  # type: ignore
_start = torch.distributed.init_process_group


def _init_process_group(*args: Any, **kwargs: Any) -> Any:
    args = tuple(arg.replace("nccl", "hccl") if isinstance(arg, str) else arg for arg in args)
    if isinstance(kwargs.get("backend"), str):
        kwargs["backend"] = kwargs["backend"].replace("nccl", "hccl")
    return _start(*args, **kwargs)


torch.distributed.init_process_group = _init_process_group
torch.distributed.is_nccl_available = torch.distributed.is_hccl_available  # type: ignore[attr-defined]
torch.jit.script = lambda obj, *args, **kwargs: obj
