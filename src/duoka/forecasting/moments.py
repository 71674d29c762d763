"""The moments of a few recorded steps of a script on one device, and the bytes of a device in them under a strategy.

A peak is the largest sum of a moment. What fsdp gathers (`duoka.sharding.blocks`) is known without the order of its
blocks: in a pass, whole blocks are as large as two of the largest, or as all that still have to send their gradients,
and each device holds its part of one that comes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from duoka.trials.observer import opened

FILE = "memory.json"

Scope = Literal[
    "parameter",
    "gradient",
    "state",  # of an optimizer
    "optimizer",  # needed only during its step
    "rows",  # grows with the batch
    "constant",  # does not
    "kept",  # made before the first step, and not part of a model
]


class Storage(NamedTuple):
    """The memory of tensors."""

    size: int
    scope: Scope
    block: int = -1  # of a parameter and what belongs to it, also a copy; -1: in none, so that fsdp does not shard it
    call: int = -1  # of a block, in which it was made; -1: in none


class Moment(NamedTuple):
    """The bytes of one device at a moment, which strategies divide among devices or add to."""

    kept: int  # whole on each device
    rows: int  # of the batch
    recomputed: int  # of these, with `--checkpoint-activations` not there
    model: int  # parameters, gradients, state, and temporary memory of the optimizer
    casts: int  # copies of parameters in another dtype
    buckets: int  # copies of gradients in ddp's buckets
    gradients: int  # of the model, those of a block that fsdp has not sent yet
    sent: int  # buffers in which it does
    gathered: int  # its whole blocks, with their casts
    coming: int  # a whole block, of which each device holds the part that it sends


@dataclass
class MemoryRecord:
    """The record of one run."""

    steps: int = 0
    batch: int | None = None  # samples in a step's batch; None if they could not be counted
    bound: int = 0  # bytes that one device needs at most, computed from the first step
    scopes: dict[str, int] = field(default_factory=dict)  # bytes that are alive at the first moment
    moments: list[Moment] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write it to a file, past the redirection of a trial."""
        with opened(folder / FILE) as file:
            file.write(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> MemoryRecord:
        """Read the record of a run that succeeded."""
        values = json.loads((folder / FILE).read_text())
        return cls(**values | {"moments": [Moment(*moment) for moment in values["moments"]]})


@dataclass(frozen=True)
class MemoryLayout:
    """A strategy on a number of devices, of all `machines` together."""

    strategy: Literal["single", "ddp", "hsdp", "fsdp"]
    devices: int
    checkpoints: bool = False  # with `--checkpoint-activations`
    machines: int = 1
    offloads: bool = False  # with `--cpu-offload`


def peak(record: MemoryRecord, layout: MemoryLayout) -> int:
    """Return the most bytes of tensors alive at once, in the recorded steps, on one of the devices."""
    batch, devices = record.batch or 1, layout.devices
    share = math.ceil(batch / devices) / batch if batch >= devices else 1.0  # a smaller batch is whole on each
    holders = devices // layout.machines if layout.strategy == "hsdp" else devices  # of one copy of the model

    def size(at: Moment) -> float:
        shared = at.kept + share * (at.rows - layout.checkpoints * at.recomputed)
        if layout.strategy in ("single", "ddp"):
            return shared + at.model + at.casts + (layout.strategy == "ddp") * at.buckets
        model = 0.0 if layout.offloads else (at.model - at.gradients) / holders
        return shared + model + at.gradients + at.sent + at.gathered + at.coming / holders

    return round(max(map(size, record.moments), default=0.0))


def on_host(record: MemoryRecord, layout: MemoryLayout) -> int:
    """Return the most bytes that `--cpu-offload` puts into the memory of each machine."""
    model = max((at.model for at in record.moments), default=0)
    return layout.offloads * (model if layout.strategy == "hsdp" else model // layout.machines)


class Timeline:
    """Storages while they are alive, and, while `records` is True, a moment after each event that adds bytes."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.records = self.is_backward = False  # is_backward: a backward pass goes on
        self.storages: dict[int, Storage] = {}  # by number
        self._bytes = dict.fromkeys(("kept", "rows", "recomputed", "model", "casts"), 0)

        self._made: dict[int, set[int]] = {}  # by the call of a block, what it has made and not freed
        self._left: dict[int, set[int]] = {}  # storage -> all that its call has left for the backward pass

        self._blocks = Counter[int]()  # bytes of each block when it is whole, with its casts
        self._all_gradients = 0  # bytes
        self._gradients = Counter[int]()  # of a block, those that are not sent yet
        self._released: set[int] = set()  # blocks that have sent their gradients in this pass
        self._sent = 0  # bytes of buffers in which gradients are under way

    def record(self) -> None:
        """Record moments from now on; the first is what is alive now."""
        self.records = True
        self._note()

    def make(self, number: int, storage: Storage) -> None:
        """Add a storage."""
        self.storages[number] = storage
        self._made.setdefault(storage.call, set()).add(number)
        self._change(storage, 1)
        self._note(in_step=storage.scope == "optimizer")

    def classify(self, number: int, scope: Scope, block: int = -1) -> None:
        """Note what a storage is for, and its block, if that is not what it was made for."""
        made = self.storages[number]
        if made[1:3] == (scope, block):
            return
        storage = self.storages[number] = made._replace(scope=scope, block=block)
        self._change(made, -1)
        self._change(storage, 1)
        if scope == "gradient" and block >= 0:
            if block not in self._gradients:  # the first of another block: those of the one before are whole
                self._send_gradients()
            self._gradients[block] += storage.size
        self._note()

    def free(self, number: int) -> None:
        """Remove a storage."""
        storage = self.storages[number]
        self._made.get(storage.call, set()).discard(number)
        if number in self._left:
            self._compute_again(number)
        self._change(storage, -1)
        del self.storages[number]

    def begin(self, what: Literal["forward", "backward", "step"]) -> None:
        """Begin a pass or an optimizer's step. At the end of a backward pass all gradients are sent."""
        if self.is_backward:  # all buckets are full then, and each is a copy of its gradients
            self._note(buckets=self._all_gradients)
        self.is_backward = what == "backward"
        if not self.is_backward:
            self._send_gradients()
            self._sent = 0
            self._released.clear()

    def leave(self, call: int, returned: Iterable[int]) -> None:
        """Note the end of a block's forward pass.

        With `--checkpoint-activations` it leaves out what it has made and not returned, until that is computed again.
        """
        left = self._made.pop(call, set()).difference(returned)
        left = {number for number in left if self.storages[number].scope == "rows"}
        self._bytes["recomputed"] += sum(self.storages[number].size for number in left)
        self._left |= dict.fromkeys(left, left)

    def _compute_again(self, number: int) -> None:
        """Put back all that a call has left out, at the first use of it; a variable of the script is only freed."""
        left = self._left[number] if self.is_backward else {number}
        for activation in list(left):
            self._bytes["recomputed"] -= self.storages[activation].size
            self._left.pop(activation).discard(activation)
        self._note()

    def _send_gradients(self) -> None:
        """Release the block whose gradients are whole, and reduce-scatter these: a copy of all, and what comes."""
        for block, size in self._gradients.items():
            self._released.add(block)
            self._sent = 2 * size
            self._note()
        self._gradients.clear()

    def _change(self, storage: Storage, sign: int) -> None:
        kind = "rows" if storage.scope == "rows" else "kept"
        if storage.scope == "constant" and storage.block >= 0:
            kind = "casts"
        elif storage.scope == "optimizer" or storage.block >= 0:
            kind = "model"
        self._bytes[kind] += sign * storage.size
        if storage.block >= 0 and storage.scope in ("parameter", "constant"):
            self._blocks[storage.block] += sign * storage.size
        if storage.scope == "gradient":
            self._all_gradients += sign * storage.size

    def _note(self, in_step: bool = False, buckets: int = 0) -> None:
        """Note a moment. in_step: of an optimizer. buckets: bytes of those of ddp."""
        if not self.records:
            return
        largest = 0 if in_step else max(self._blocks.values(), default=0)
        held = sum(size for block, size in self._blocks.items() if block not in self._released)
        moment = Moment(
            **self._bytes,
            buckets=buckets,
            gradients=sum(self._gradients.values()),
            sent=self._sent,
            gathered=min(held, 2 * largest),  # the block in use and one more
            coming=largest,
        )
        self.moments.append(moment)
