"""A device `other` that computes on the CPU, and refuses to compute with tensors that are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroupGloo
from torch.library import Library
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

# Of torch's later versions; experimental.
setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
_COPIES = ("copy_", "_copy_from", "_to_copy")


class _Backend:
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    def set_rng_state(self, state: Tensor) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class OtherTensor(Tensor):
    """A tensor on this device. on_cpu: its values."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> OtherTensor:
        facts = {"dtype": on_cpu.dtype, "device": torch.device("other", 0), "storage_offset": on_cpu.storage_offset()}
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: OtherTensor = make(cls, on_cpu.shape, strides=on_cpu.stride(), **facts)
        made.on_cpu = on_cpu
        return made

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in _COPIES and any(one.dim() and not isinstance(one, OtherTensor) for one in given):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {given}")
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        cpu_args, cpu_kwargs = tree_map_only(OtherTensor, lambda one: one.on_cpu, (args, kwargs))
        out = func(*cpu_args, **cpu_kwargs)
        if asked is not None and torch.device(asked).type == "cpu":
            return out
        known = {id(one.on_cpu): one for one in given if isinstance(one, OtherTensor)}
        written = [args[0]] if name.endswith("_") and args and isinstance(args[0], Tensor) else []

        def back(one: Tensor) -> Tensor:
            return written[0] if written else known[id(one)] if id(one) in known else OtherTensor(one)

        return tree_map_only(Tensor, back, out)


class _Group:
    """A process group of this device."""

    def __init__(self, *args: Any) -> None:
        self._group = ProcessGroupGloo(*args)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            return getattr(self._group, name)(*tree_map_only(OtherTensor, lambda one: one.on_cpu, args))

        return call


def install() -> Library:
    """Make the device in this process; it lasts while what this returns is kept."""
    assert setup is not None
    setup("other", backend_module=_Backend())

    def empty(size: Sequence[int], dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return OtherTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, *_: Any, **__: Any) -> Tensor:
        return OtherTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        plain = [one.on_cpu if isinstance(one, OtherTensor) else one for one in (source, target)]
        plain[1].copy_(plain[0])
        return target

    library = Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", empty)
    library.impl("empty_strided", empty_strided)
    library.impl("_copy_from", copy_from)
    Backend.register_backend("others", _Group, devices=["other"])
    return library
