"""duoka runs PyTorch training on the devices you have: same script, same result, same checkpoint."""

# What is where: ARCHITECTURE.md.
#
# Importing duoka imports none of it: each public name imports its module on first use. So
# system/environment.py cannot set the one variable that is set here.

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.checkpoint.checkpoint import Checkpoint
    from duoka.checkpoint.loading import Loaded, load_weights
    from duoka.checkpoint.saving import save_weights
    from duoka.errors import (
        AskedError,
        BatchFailed,
        CheckpointBusy,
        CheckpointDamaged,
        CheckpointError,
        DeviceError,
        DevicesBusy,
        DuokaError,
        OptionError,
        PeerLost,
        RanksApart,
        Refused,
        RunError,
        ScriptError,
        TimedOut,
        UnsafePickle,
        VersionError,
        WeightsError,
        WeightsMismatch,
        WorkerFailed,
    )
    from duoka.inference.predict import predict
    from duoka.launchers.function import launch
    from duoka.planning.picking import devices as devices
    from duoka.run import Run, start

__version__ = "0.1.0"

# torch.cuda.is_available() then asks the driver's library, and the workers that `launch` forks later can use CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

__all__ = [
    "AskedError",
    "BatchFailed",
    "Checkpoint",
    "CheckpointBusy",
    "CheckpointDamaged",
    "CheckpointError",
    "DeviceError",
    "DevicesBusy",
    "DuokaError",
    "Loaded",
    "OptionError",
    "PeerLost",
    "RanksApart",
    "Refused",
    "Run",
    "RunError",
    "ScriptError",
    "TimedOut",
    "UnsafePickle",
    "VersionError",
    "WeightsError",
    "WeightsMismatch",
    "WorkerFailed",
    "__version__",
    "devices",
    "launch",
    "load_weights",
    "predict",
    "save_weights",
    "start",
]

_HOMES = dict.fromkeys(__all__, "duoka.errors") | {
    "Checkpoint": "duoka.checkpoint.checkpoint",
    "Loaded": "duoka.checkpoint.loading",
    "Run": "duoka.run",
    "devices": "duoka.planning.picking",
    "launch": "duoka.launchers.function",
    "load_weights": "duoka.checkpoint.loading",
    "predict": "duoka.inference.predict",
    "save_weights": "duoka.checkpoint.saving",
    "start": "duoka.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'duoka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
