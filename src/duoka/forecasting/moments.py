"""The moments of a few recorded steps of a script on one device, and the bytes of a device in them under a strategy.

A peak is the largest sum of a moment. What fsdp gathers and sends follows `duoka.sharding.blocks` in outline: the
blocks used last stay, together with the next one at most twice the bytes of the largest; each use of another block
gathers it; a block is released when its gradients are reduce-scattered, and those of one block are sent at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from duoka.strategies.buckets import BUCKET_BYTES
from duoka.trials.observer import opened

FILE = "memory.json"

Scope = Literal["parameter", "gradient", "state", "optimizer", "rows", "constant", "kept"]
What = Literal["made", "freed", "used", "leave", "step", "backward", "forward"]


class Storage(NamedTuple):
    """The memory of tensors.

    scope: parameter, gradient, state of an optimizer; "optimizer": needed only during its step; "rows": grows with
    the batch; "constant": does not; "kept": made before the first step, and not part of a model. block: of a
    parameter, and of what belongs to it; of a copy of one, too; -1: in none, so that fsdp does not shard it. call:
    the call of a block in which it was made; -1: in none.
    """

    size: int
    scope: Scope
    block: int = -1
    call: int = -1


class Event(NamedTuple):
    """What happened.

    what: "made" or "freed", "used" (a parameter, in a computation), "leave" (the end of a block's forward pass),
    "step" (the begin of an optimizer's step), "backward" or "forward" (the pass, from here on). number: of the
    storage, or of the block's call.
    """

    what: What
    number: int


class Moment(NamedTuple):
    """The bytes of one device at a moment, which strategies divide among devices or add to.

    kept: whole on each device. rows: of the batch. recomputed: of these, with `--checkpoint-activations` not there.
    model: parameters, gradients, state, and temporary memory of the optimizer. casts: copies of parameters in another
    dtype. buckets: copies of gradients in ddp's buckets. gradients: whole ones of a block, until fsdp sends them.
    sent: buffers in which it does. gathered: its whole blocks, with their casts. received: of these, a block that is
    coming now, to which each device sends its part. copied: what comes, in one tensor, before it is taken apart.
    """

    kept: int
    rows: int
    recomputed: int
    model: int
    casts: int
    buckets: int
    gradients: int
    sent: int
    gathered: int
    received: int
    copied: int


@dataclass
class MemoryRecord:
    """The record of one run.

    batch: samples in a step's batch; None if they could not be counted. bound: bytes that one device needs at most,
    computed from the first step. scopes: bytes that are alive at the first moment, by scope.
    """

    steps: int = 0
    batch: int | None = None
    bound: int = 0
    scopes: dict[str, int] = field(default_factory=dict)
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
    """A strategy on a number of devices, of all `machines` together.

    checkpoints: with `--checkpoint-activations`. offloads: with `--cpu-offload`.
    """

    strategy: Literal["single", "ddp", "hsdp", "fsdp"]
    devices: int
    checkpoints: bool = False
    machines: int = 1
    offloads: bool = False


def peak(record: MemoryRecord, layout: MemoryLayout) -> int:
    """Return the most bytes of tensors alive at once, in the recorded steps, on one of the devices."""
    batch, devices = record.batch or 1, layout.devices
    share = math.ceil(batch / devices) / batch if batch >= devices else 1.0
    holders = devices // layout.machines if layout.strategy == "hsdp" else devices  # of one copy of the model

    def size(at: Moment) -> float:
        shared = at.kept + share * (at.rows - layout.checkpoints * at.recomputed)
        if layout.strategy in ("single", "ddp"):
            return shared + at.model + at.gradients + at.casts + (layout.strategy == "ddp") * at.buckets
        coming = at.received / holders + at.copied
        model = 0.0 if layout.offloads else at.model / holders
        return shared + model + at.gradients + at.sent + at.gathered + coming

    return round(max(map(size, record.moments), default=0.0))


def on_host(record: MemoryRecord, layout: MemoryLayout) -> int:
    """Return the most bytes that `--cpu-offload` puts into the memory of each machine."""
    model = max((at.model for at in record.moments), default=0)
    return layout.offloads * (model if layout.strategy == "hsdp" else model // layout.machines)


class Timeline:
    """The moments of recorded events: one after each that adds bytes.

    alive: numbers of the storages at the first event. returned: call of a block -> the storages that it returned.
    """

    def __init__(
        self,
        storages: Mapping[int, Storage],
        alive: Sequence[int],
        events: Sequence[Event],
        returned: Mapping[int, Sequence[int]],
    ) -> None:
        self.moments: list[Moment] = []
        self._storages = storages
        self._bytes = dict.fromkeys(("kept", "rows", "recomputed", "model", "casts"), 0)
        self._casts: dict[int, int] = {}  # by block
        self._is_backward = False

        self._made: dict[int, set[int]] = {}  # by the call of a block, what it has made and not freed
        self._returned = returned
        self._left: dict[int, set[int]] = {}  # storage -> all that its call has left for the backward pass

        self._sizes: dict[int, int] = {}  # of blocks
        for storage in (storages[number] for number in alive):
            if storage.scope == "parameter" and storage.block >= 0:
                self._sizes[storage.block] = self._sizes.get(storage.block, 0) + storage.size
        self._largest = max(self._sizes.values(), default=0)
        self._gathered: dict[int, int] = {}  # blocks, the one used last at the end
        self._ahead = -1  # the next block, which is received while this one computes
        self._following, self._last_gradients = _look_ahead(storages, events)

        self._gradients: dict[int, int] = {}  # whole ones of a block, which are not sent yet
        self._under_way = 0  # bytes of those that are sent
        self._full = self._open = 0  # bytes of ddp's buckets: those that are sent, and the one that is being filled

        for number in alive:
            self._change(storages[number], 1)
        self._note()
        for at, (what, number) in enumerate(events):
            if what == "made":
                self._make(at, number)
            elif what == "freed":
                self._free(number)
            elif what == "used":
                self._use(at, storages[number].block)
            elif what == "leave":
                self._leave(number)
            elif what == "step":
                self._send_gradients()
                self._under_way = 0
            else:
                self._is_backward = what == "backward"

    def _note(self, sent: int = 0, received: int = -1, bucket: int = 0) -> None:
        """Note a moment. sent: bytes in new buffers. received: a block that comes. bucket: bytes of the open one."""
        gathered = sum(self._gathered.values()) + sum(self._casts.get(block, 0) for block in self._gathered)
        ahead = self._sizes.get(self._ahead, 0)
        moment = Moment(
            **self._bytes,
            buckets=self._full + bucket,
            gradients=sum(self._gradients.values()),
            sent=sent or self._under_way,
            gathered=gathered + ahead,
            received=self._sizes.get(received, ahead),
            copied=self._sizes.get(received, 0),
        )
        self.moments.append(moment)

    def _change(self, storage: Storage, sign: int) -> None:
        kind = "rows" if storage.scope == "rows" else "kept"
        if storage.scope == "constant" and storage.block >= 0:
            kind = "casts"
            self._casts[storage.block] = self._casts.get(storage.block, 0) + sign * storage.size
        elif storage.scope == "optimizer" or storage.block >= 0:
            kind = "model"
        self._bytes[kind] += sign * storage.size

    def _make(self, at: int, number: int) -> None:
        storage = self._storages[number]
        self._made.setdefault(storage.call, set()).add(number)
        if storage.scope != "gradient":
            self._change(storage, 1)
        else:
            self._make_gradient(storage)
        if at in self._last_gradients:
            self._note(bucket=self._open)
            self._full = self._open = 0
        self._note()

    def _make_gradient(self, storage: Storage) -> None:
        """Add a gradient: with ddp to a bucket, with fsdp whole, until the gradients of its block are sent."""
        if self._open + storage.size > BUCKET_BYTES:
            self._full, self._open = self._full + self._open, 0
        self._open += storage.size
        if storage.block < 0:
            self._change(storage, 1)
            return
        if storage.block not in self._gradients:
            self._send_gradients()
        self._gradients[storage.block] = self._gradients.get(storage.block, 0) + storage.size

    def _send_gradients(self) -> None:
        """Release the block whose gradients are whole, and reduce-scatter these: a copy of all, and what comes."""
        for block, size in self._gradients.items():
            self._gathered.pop(block, None)
            self._note(sent=2 * size)
            self._under_way = 2 * size
            self._bytes["model"] += size
        self._gradients = {}
        self._note()

    def _free(self, number: int) -> None:
        storage = self._storages[number]
        self._made.get(storage.call, set()).discard(number)
        if number in self._left:
            self._compute_again(number)
        self._change(storage, -1)

    def _use(self, at: int, block: int) -> None:
        """Gather a block, and begin with the one after it."""
        if block < 0 or block == next(reversed(self._gathered), None):
            return
        if self._is_backward and block not in self._gradients:
            self._send_gradients()
        self._gathered.pop(block, None)
        self._ahead = -1
        self._gathered[block] = self._sizes[block]
        self._make_room(0)
        self._note(received=block)
        following = self._following[at]
        if following >= 0 and following not in self._gathered:
            self._make_room(self._sizes[following])
            self._ahead = following
        self._note()

    def _make_room(self, size: int) -> None:
        """Release the blocks used longest ago, but for the last, so that what is whole has room for `size` more."""
        while len(self._gathered) > 1 and sum(self._gathered.values()) + size > 2 * self._largest:
            self._gathered.pop(next(iter(self._gathered)))

    # --- activation checkpointing

    def _leave(self, call: int) -> None:
        """Leave out what a block has made and not returned: its activations, until they are computed again."""
        left = self._made.pop(call, set()).difference(self._returned.get(call, ()))
        left = {number for number in left if self._storages[number].scope == "rows"}
        self._bytes["recomputed"] += sum(self._storages[number].size for number in left)
        self._left |= dict.fromkeys(left, left)

    def _compute_again(self, number: int) -> None:
        """Put back all that a call has left out, at the first use of it; a variable of the script is only freed."""
        left = self._left[number] if self._is_backward else {number}
        for activation in list(left):
            self._bytes["recomputed"] -= self._storages[activation].size
            self._left.pop(activation).discard(activation)
        self._note()


def _look_ahead(storages: Mapping[int, Storage], events: Sequence[Event]) -> tuple[dict[int, int], set[int]]:
    """Return what is known only later, by the index of an event.

    For each use of a parameter, the block that is used after this one, before the next step (-1: none); and the last
    gradients before a step, with which ddp sends the bucket that it is filling.
    """
    following: dict[int, int] = {}
    lasts: set[int] = set()
    current = after = -1
    is_last = False
    for at in range(len(events) - 1, -1, -1):
        what, number = events[at]
        if what == "step":
            current, after, is_last = -1, -1, True
        elif what == "used" and storages[number].block >= 0:
            if storages[number].block != current:
                current, after = storages[number].block, current
            following[at] = after
        elif what == "made" and storages[number].scope == "gradient" and is_last:
            lasts.add(at)
            is_last = False
    return following, lasts
