"""duoka runs PyTorch training on the devices you have: same script, same result, same checkpoint."""

# The house, from the door inwards. A file imports downwards only.
#
#   cli/          one file per command, and a table of them
#   launchers/    how workers come to life
#   worker.py     one worker's life, to be read top to bottom
#   plain/        running a script that knows nothing of all this
#   data/         a rank's rows of every batch
#   strategies/   how parameters are kept in step, one file per strategy
#   checkpoint/   weights from anywhere, and checkpoints that cannot be lost
#   view/         the global view: tensors that stand for a whole global batch
#   board.py      what workers show the process that watches them
#   environment.py, rendezvous.py, target.py, ending.py, traces.py    what a worker lives in, one subject each
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
        CheckpointBusy,
        CheckpointDamaged,
        CheckpointError,
        DeviceError,
        DuokaError,
        OptionError,
        PeerLost,
        RanksApart,
        Refused,
        RunError,
        ScriptError,
        TimedOut,
        UnsafePickle,
        WeightsError,
        WeightsMismatch,
        WorkerFailed,
    )

__version__ = "0.1.0"

__all__ = [
    "AskedError",
    "Checkpoint",
    "CheckpointBusy",
    "CheckpointDamaged",
    "CheckpointError",
    "DeviceError",
    "DuokaError",
    "Loaded",
    "OptionError",
    "PeerLost",
    "RanksApart",
    "Refused",
    "RunError",
    "ScriptError",
    "TimedOut",
    "UnsafePickle",
    "WeightsError",
    "WeightsMismatch",
    "WorkerFailed",
    "__version__",
    "load_weights",
    "save_weights",
]

_HOMES = dict.fromkeys(__all__, "duoka.errors") | {
    "Checkpoint": "duoka.checkpoint.checkpoint",
    "Loaded": "duoka.checkpoint.loading",
    "load_weights": "duoka.checkpoint.loading",
    "save_weights": "duoka.checkpoint.saving",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'duoka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
