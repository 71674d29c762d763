"""duoka runs PyTorch training on the devices you have: same script, same result, same checkpoint."""

# The house, from the door inwards. A file imports downwards only.
#
#   cli/          one file per command, and a table of them
#   doctor/       whether this machine will train well
#   launchers/    how workers come to life
#   worker.py     one worker's life, to be read top to bottom
#   plain/        running a script that knows nothing of all this
#   inference/    a model's outputs for all items of some data, over every device
#   data/         a rank's rows of every batch
#   strategies/   how parameters are kept in step, one file per strategy
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
    from duoka.errors import (
        AskedError,
        BatchFailed,
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
        WorkerFailed,
    )
    from duoka.inference.predict import predict
    from duoka.picking import devices as devices

__version__ = "0.1.0"

__all__ = [
    "AskedError",
    "BatchFailed",
    "DeviceError",
    "DevicesBusy",
    "DuokaError",
    "OptionError",
    "PeerLost",
    "RanksApart",
    "Refused",
    "RunError",
    "ScriptError",
    "TimedOut",
    "WorkerFailed",
    "__version__",
    "devices",
    "predict",
]

_HOMES = {name: "duoka.errors" for name in __all__ if name != "__version__"} | {
    "devices": "duoka.picking",
    "predict": "duoka.inference.predict",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'duoka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
