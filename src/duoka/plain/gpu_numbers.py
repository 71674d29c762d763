"""GPU numbers in a script (`.to(...)`, `set_device(1)`): each means the one GPU of this rank.

A script written for one process sees all its GPUs, and a rank sees one, whose number is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from duoka.hardware import accelerator
from duoka.hardware.vendors import TYPES
from duoka.plain.patching import Patches
from duoka.plain.session import Session
from duoka.private.torch import DEVICE_CONTEXT, constructors, device_index_functions

_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like randint_like"
_NEW = "new_tensor new_empty new_empty_strided new_full new_zeros new_ones"
# What functions of torch's module for GPUs return in a trial on the CPU.
_WITHOUT_GPU = {
    **dict.fromkeys(("set_device", "synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats")),
    "current_device": 0,
    "get_device_name": "GPU",
}


def install(session: Session) -> None:
    """Map the numbers, if this rank has a GPU."""
    if torch.accelerator.is_available():
        map_gpus(session.patches, torch.device(accelerator.kind(), 0), session.say)


def map_gpus(patches: Patches, device: torch.device, say: Callable[[str], None]) -> None:
    """Replace functions that take a device: every GPU becomes `device`.

    device: this rank's GPU; or the CPU, for a trial of a script that asks for a GPU. say: prints a line about the
    first number.
    """
    told: list[str] = []
    trial = device.type == "cpu"
    types = TYPES if trial else (device.type,)

    def mapped(asked: Any) -> Any:
        if isinstance(asked, str) and asked.startswith(types):
            asked = torch.device(asked)
        if isinstance(asked, int) and not isinstance(asked, bool):
            asked = torch.device(types[0], asked)
        if not isinstance(asked, torch.device) or asked.type not in types or asked == device:
            return asked
        if not trial and getattr(asked, "index", None) is None:  # the current one; torch's type says int
            return asked
        if not trial and not told:
            told.append(f"{asked} in the script is each rank's own GPU")
            say(told[0])
        return device

    def map_named(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = mapped(kwargs["device"])
        return original(*args, **kwargs)

    for space, name in constructors():
        patches.around(space, name)(map_named)
    for space, names in ((torch, _LIKE), (Tensor, _NEW)):
        patches.around(space, *names.split())(map_named)

    @patches.around(DEVICE_CONTEXT, "__init__")
    @patches.around(Tensor, "to")
    def map_first(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return map_named(original, self, *map(mapped, args[:1]), *args[1:], **kwargs)

    @patches.around(torch.serialization, "default_restore_location")
    def restore(original: Callable[..., Any], storage: Any, location: str) -> Any:
        return original(storage, str(mapped(location)) if location.startswith(types) else location)

    def map_index(original: Callable[..., Any], asked: Any, *args: Any, **kwargs: Any) -> Any:
        return original(asked if isinstance(asked, int) and asked < 0 else mapped(asked), *args, **kwargs)

    if not trial:
        if hasattr(Tensor, device.type):  # there is no Tensor.mps
            patches.replace(Tensor, device.type, lambda original: _to_accelerator)
        for space, name in device_index_functions(accelerator.module()):
            patches.around(space, name)(map_index)
        return
    for name in ("pin_memory", *types):
        if hasattr(Tensor, name):
            patches.put(Tensor, name, lambda self, *args, **kwargs: self)
    for space, (name, value) in product((getattr(torch, name, None) for name in types), _WITHOUT_GPU.items()):
        if hasattr(space, name):
            patches.put(space, name, lambda *args, value=value, **kwargs: value)


def _to_accelerator(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    """The method named after an accelerator; that of an extension waits for each copy of a tensor of a subclass."""
    return self.to(accelerator.kind() if device is None else device, non_blocking=non_blocking, **kwargs)
