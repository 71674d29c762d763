"""Small models with every kind of tensor, and a comparison of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Convolution, BatchNorm with its counter, and a head."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, classes)


class Odd(nn.Module):
    """Tensors that formats may handle wrongly: 16 bits, complex, empty, 0-d, bool, not contiguous, shared."""

    def __init__(self) -> None:
        super().__init__()
        kinds: dict[str, Tensor] = {
            "f16": torch.randn(3, 2).half(),
            "bf16": torch.randn(5).bfloat16(),
            "f64": torch.randn(2, 2, dtype=torch.float64),
            "c64": torch.randn(3, dtype=torch.complex64),
            "wide": torch.randn(2, 1, dtype=torch.complex128),
            "empty": torch.empty(0, 3),
            "single": torch.randn(()),
            "flags": torch.tensor([True, False, True]),
            "count": torch.tensor(2**40),
            "u8": torch.arange(7, dtype=torch.uint8),
            "across": torch.randn(4, 3).t(),
        }
        for name, tensor in kinds.items():
            self.register_buffer(name, tensor)
        self.one = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return True if all tensors are equal in bits and type."""
    ours, theirs = one.state_dict(), other.state_dict()
    return [*ours] == [*theirs] and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def differs(one: nn.Module, other: nn.Module) -> bool:
    """Return True if loading one into the other would change it."""
    return not same(one, other)


class Calls:
    """Creates the file `path` when an unrestricted reader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class Own:
    """An object of a class that no reader of weights knows."""

    def __init__(self) -> None:
        self.setting = 3


def compiled(net: nn.Module) -> nn.Module:
    """Wrap a model as `torch.compile` does, without importing a compiler, which takes seconds."""
    return torch.compile(net, backend="eager")  # type: ignore[return-value]
