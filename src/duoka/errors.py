"""Every error that duoka raises, and how it words them.

    DuokaError                  anything that duoka raises on purpose
    ├── AskedError              what was asked for cannot be: the caller's turn
    │   ├── OptionError         a value that an option does not take
    │   ├── DeviceError         a device that is not there, or may not be used
    │   │   └── DevicesBusy     as many as are asked for are there, and others use them now
    │   └── ScriptError         a script that cannot be found, read or compiled
    ├── Refused                 a script does something that duoka cannot do faithfully
    ├── WeightsError            a file of weights cannot be read, or written
    │   ├── UnsafePickle        reading it would run code
    │   └── WeightsMismatch     what is in it does not fit the model
    ├── CheckpointError         a checkpoint cannot be written, or none can be read
    │   ├── CheckpointBusy      another run is writing into its directory
    │   └── CheckpointDamaged   its files are not what its manifest says
    ├── VersionError            this torch or Python lacks a part that duoka uses
    └── RunError                the world failed while a run was going on
        ├── BatchFailed         a batch of a prediction could not be computed
        ├── PeerLost            another rank went away in the middle of a collective
        ├── TimedOut            another rank did not join a collective in time
        ├── RanksApart          ranks called different collectives
        └── WorkerFailed        a worker process ended badly

One grammar for all messages: what was given, what is allowed, what to do.
"""

from __future__ import annotations

from typing import Any


class DuokaError(Exception):
    """Anything that duoka raises on purpose."""


class AskedError(DuokaError):
    """What was asked for cannot be done as asked. Exit code 2."""


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()  # in place of what was not given at all


class OptionError(AskedError):
    """`option` was given `given` (`MISSING`: nothing), which is not among what is `allowed`."""

    def __init__(self, option: str, given: object, allowed: str, hint: str = "") -> None:
        self.option, self.given, self.allowed, self.hint = option, given, allowed, hint
        text = f"{option} must be {allowed}, but is {given!r}"
        super().__init__(f"{text}; {hint}" if hint else text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes."""
        return type(self), (self.option, self.given, self.allowed, self.hint)


class DeviceError(AskedError):
    """A device that this machine does not have, or that may not be used."""


class DevicesBusy(DeviceError):
    """As many devices as are asked for are there, and others use them now. `users`: who uses which, in words."""

    def __init__(self, message: str, users: str) -> None:
        self.users = users
        super().__init__(f"{message}; --wait, or wait= in Python, queues until they are free")


class ScriptError(AskedError):
    """A script that cannot be found, read or compiled."""


class VersionError(DuokaError):
    """This version of torch or Python does not have a private part that duoka uses, or has changed it."""


class Refused(DuokaError):
    """The script does something that cannot be run faithfully on several devices."""


class WeightsError(DuokaError):
    """A file of weights cannot be read, or written."""


class UnsafePickle(WeightsError):
    """Reading this file would run code that it names. None of it has run."""


class WeightsMismatch(WeightsError):
    """The tensors of a file do not fit the model."""


class CheckpointError(DuokaError):
    """A checkpoint cannot be written, or none can be read."""


class CheckpointBusy(CheckpointError):
    """Another run is writing into the directory."""


class CheckpointDamaged(CheckpointError):
    """The files of a checkpoint are not what its manifest says."""


class RunError(DuokaError):
    """The world failed while a run was going on."""


class BatchFailed(RunError):
    """A batch of a prediction could not be computed; what was raised is its `__cause__`.

    indices: the places of its items in the data, from 0. reason: what was raised, in words.
    """

    def __init__(self, indices: range, device: str, reason: str) -> None:
        self.indices, self.device, self.reason = indices, device, reason
        items = f"item {indices[0]:,}" if len(indices) == 1 else f"items {indices[0]:,} to {indices[-1]:,}"
        super().__init__(f"{items} on {device}: {reason}")

    def __reduce__(self) -> tuple[type[BatchFailed], tuple[range, str, str]]:
        """To go from rank to rank, where its cause may not be able to."""
        return BatchFailed, (self.indices, self.device, self.reason)


class PeerLost(RunError):
    """Another rank went away in the middle of a collective. Never the first cause."""


class TimedOut(RunError):
    """Another rank did not join a collective in time."""


class RanksApart(RunError):
    """Ranks called different collectives: their scripts no longer do the same."""


class WorkerFailed(RunError):
    """A worker process ended badly."""
