"""The tree of errors that duoka raises.

    DuokaError                  anything that duoka raises on purpose
    ├── AskedError              a requested setting is impossible
    │   ├── OptionError         an option has a value that is not allowed
    │   ├── DeviceError         a device does not exist, or may not be used
    │   │   └── DevicesBusy     other runs use the devices now
    │   └── ScriptError         a script does not exist, or cannot be read or compiled
    ├── Refused                 a script does something that duoka cannot compute correctly on several devices
    ├── WeightsError            a file of weights cannot be read or written
    │   ├── UnsafePickle        reading it would execute code
    │   └── WeightsMismatch     its tensors do not fit the model
    ├── CheckpointError         a checkpoint cannot be written, or none can be read
    │   ├── CheckpointBusy      another run is writing into its directory
    │   └── CheckpointDamaged   its files differ from its manifest
    ├── VersionError            this torch or Python lacks a part that duoka uses
    └── RunError                a run failed
        ├── BatchFailed         a batch of a prediction could not be computed
        ├── PeerLost            another rank ended during a collective
        ├── TimedOut            another rank did not join a collective in time
        ├── RanksApart          ranks called different collectives
        └── WorkerFailed        a worker process ended badly

Messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations

from typing import Any


class DuokaError(Exception):
    """The base class of all errors that duoka raises on purpose."""


class AskedError(DuokaError):
    """A requested setting is impossible. Exit code 2."""


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()  # the value of an option that was not given


class OptionError(AskedError):
    """The option `option` has a `value` (`MISSING`: none) that is not `allowed`. hint: what to do."""

    def __init__(self, option: str, value: object, allowed: str, hint: str = "") -> None:
        self.option, self.value, self.allowed, self.hint = option, value, allowed, hint
        shown = f"given {value!r}" if allowed.startswith("given ") and value is not MISSING else repr(value)
        text = f"{option} must be {allowed}, but is {shown}"
        super().__init__(f"{text}; {hint}" if hint else text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, to be sent between processes."""
        return type(self), (self.option, self.value, self.allowed, self.hint)


class DeviceError(AskedError):
    """A device does not exist on this machine, or may not be used."""


class DevicesBusy(DeviceError):
    """Other runs use the requested devices now. users: a description of who uses which."""

    def __init__(self, message: str, users: str) -> None:
        self.users = users
        super().__init__(f"{message}; --wait, or wait= in Python, queues until they are free")


class ScriptError(AskedError):
    """A script does not exist, or cannot be read or compiled."""


class VersionError(DuokaError):
    """This version of torch or Python lacks a private part that duoka uses, or has changed it."""


class Refused(DuokaError):
    """The script does something that duoka cannot compute correctly on several devices."""


class WeightsError(DuokaError):
    """A file of weights cannot be read or written."""


class UnsafePickle(WeightsError):
    """Reading this file would execute code that it names. None was executed."""


class WeightsMismatch(WeightsError):
    """The tensors of a file do not fit the model."""


class CheckpointError(DuokaError):
    """A checkpoint cannot be written, or none can be read."""


class CheckpointBusy(CheckpointError):
    """Another run is writing into the directory."""


class CheckpointDamaged(CheckpointError):
    """The files of a checkpoint differ from its manifest."""


class RunError(DuokaError):
    """A run failed."""


class BatchFailed(RunError):
    """A batch of a prediction could not be computed; the error is its `__cause__`.

    indices: of its items in the data, from 0. reason: the error, in words.
    """

    def __init__(self, indices: range, device: str, reason: str) -> None:
        self.indices, self.device, self.reason = indices, device, reason
        items = f"item {indices[0]:,}" if len(indices) == 1 else f"items {indices[0]:,} to {indices[-1]:,}"
        super().__init__(f"{items} on {device}: {reason}")

    def __reduce__(self) -> tuple[type[BatchFailed], tuple[range, str, str]]:
        """Pickle without the cause, which may not be picklable."""
        return BatchFailed, (self.indices, self.device, self.reason)


class PeerLost(RunError):
    """Another rank ended during a collective. Never the first cause."""


class TimedOut(RunError):
    """Another rank did not join a collective in time."""


class RanksApart(RunError):
    """Ranks called different collectives: their scripts no longer do the same."""


class WorkerFailed(RunError):
    """A worker process ended badly."""
