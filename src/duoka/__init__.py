"""duoka runs PyTorch training on the devices you have: same script, same result, same checkpoint."""

# The house, from the door inwards. A file imports downwards only.
#
#   cli/          one file per command, and a table of them
#   doctor/       whether this machine will train well
#   launchers/    how workers come to life
#   worker.py     one worker's life, to be read top to bottom
#   run/          the API: what a script that knows of ranks holds in its hand
#   plain/        running a script that knows nothing of all this
#   inference/    a model's outputs for all items of some data, over every device
#   data/         a rank's rows of every batch
#   strategies/   how parameters are kept in step, one file per strategy
#   process.py    the one thing that belongs to a process as a whole
#   origins/      how this process was started, and so which rank it is
#   checkpoint/   weights from anywhere, and checkpoints that cannot be lost
#   view/         the global view: tensors that stand for a whole global batch
#   board.py      what workers show the process that watches them
#   environment.py, rendezvous.py, target.py, ending.py, traces.py    what a worker lives in, one subject each
#   picking.py    devices for a program that picks its own
#   plan.py       what was decided; made out of options.py (what was asked for), devices/ and script/
#   errors.py     the tree of errors
#
# Importing duoka imports none of it: each public name brings its file on first use.

from __future__ import annotations

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
    from duoka.picking import devices as devices
    from duoka.run import Run, clip_grad_norm_, scale_lr, start, warmup

__version__ = "0.1.0"

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
    "clip_grad_norm_",
    "devices",
    "launch",
    "load_weights",
    "predict",
    "save_weights",
    "scale_lr",
    "start",
    "warmup",
]

_HOMES = dict.fromkeys(__all__, "duoka.errors") | {
    "Checkpoint": "duoka.checkpoint.checkpoint",
    "Loaded": "duoka.checkpoint.loading",
    "Run": "duoka.run",
    "clip_grad_norm_": "duoka.run",
    "devices": "duoka.picking",
    "launch": "duoka.launchers.function",
    "load_weights": "duoka.checkpoint.loading",
    "predict": "duoka.inference.predict",
    "save_weights": "duoka.checkpoint.saving",
    "scale_lr": "duoka.run",
    "start": "duoka.run",
    "warmup": "duoka.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'duoka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
