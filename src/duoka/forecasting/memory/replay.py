"""The peak memory of one of several devices: a record's events, with the bytes that each would have there.

Rows are divided by the devices, as the batch is. With ddp, gradients are copied to buckets. With fsdp, parameters,
gradients and the optimizer's state are divided, too, and blocks are gathered and gradients reduce-scattered in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from duoka.forecasting.memory.gathered import Gathered
from duoka.forecasting.memory.record import MemoryEvent, MemoryRecord, Storage
from duoka.strategies.buckets import BUCKET_BYTES


@dataclass(frozen=True)
class MemoryLayout:
    """A strategy on a number of devices, of all `machines` together. checkpoints: with `--checkpoint-activations`."""

    strategy: Literal["single", "ddp", "hsdp", "fsdp"]
    devices: int
    checkpoints: bool = False
    machines: int = 1

    @property
    def holders(self) -> int:
        """The number of devices that hold one copy of the model in parts: with hsdp, those of a machine."""
        return self.devices // self.machines if self.strategy == "hsdp" else self.devices


def peak(record: MemoryRecord, layout: MemoryLayout) -> int:
    """Return the most bytes of tensors alive at once, in the recorded steps, on one of the devices."""
    return round(_Replay(record, layout).run())


class _Replay:
    """The state at one moment of the replay."""

    def __init__(self, record: MemoryRecord, layout: MemoryLayout) -> None:
        self._record, self._layout = record, layout
        self._is_sharded = layout.strategy in ("fsdp", "hsdp")
        batch, devices = record.batch or 1, layout.devices
        self._share = math.ceil(batch / devices) / batch if batch >= devices else 1.0
        self._held: dict[int, float] = {}  # number of the storage -> bytes here
        self._now = self._peak = 0.0
        self._gathered = Gathered(*_groups(record, layout.holders))
        self._sent = _Sent(record)
        self._casts: dict[int, float] = {}  # group -> bytes of copies of its parameters in another dtype
        self._recomputed = _recomputed(record) if layout.checkpoints else {}
        self._is_backward = False
        self._hidden: dict[int, tuple[int, set[int]]] = {}  # storage -> call, and all that it left out

    def run(self) -> float:
        for number in self._record.alive:
            self._add(number, self._size(number))
        self._see()
        for place, event in enumerate(self._record.events):
            self._follow(place, event)
            self._see()
        return self._peak

    def _see(self, extra: float = 0.0) -> None:
        gathered = self._gathered.size if self._is_sharded else 0.0
        self._peak = max(self._peak, self._now + gathered + self._cast_size() + self._sent.size + extra)

    def _cast_size(self) -> float:
        """Return the bytes of copies in another dtype of the blocks that are whole now."""
        return sum(size for group, size in self._casts.items() if self._gathered.has(group))

    def _follow(self, place: int, event: MemoryEvent) -> None:
        what, number = event
        if what == "made":
            self._make(place, number)
        elif what == "freed":
            self._free(number)
        elif what == "used" and self._is_sharded:
            self._use(number)
        elif what == "leave" and number in self._recomputed:
            self._hide(number)
        elif what in ("backward", "forward"):
            self._is_backward = what == "backward"
        elif what == "step":
            self._finish_gradients()
            self._gathered.step()

    def _make(self, place: int, number: int) -> None:
        storage = self._record.storages[number]
        if storage.scope == "constant" and self._goes_apart(storage):
            self._casts[storage.group] = self._casts.get(storage.group, 0.0) + storage.size
        elif storage.scope == "gradient" and self._layout.strategy != "single":
            self._make_gradient(place, number, storage)
        else:
            self._add(number, self._size(number))

    def _free(self, number: int) -> None:
        storage = self._record.storages[number]
        if number in self._hidden and self._is_backward:
            self._restore(number)
        elif number in self._hidden:  # the script's own variable, not needed for the backward pass
            _, inner = self._hidden.pop(number)
            inner.discard(number)
            self._held.pop(number)
        if storage.scope == "constant" and number not in self._held and storage.group in self._casts:
            self._casts[storage.group] -= storage.size
        self._now -= self._held.pop(number, 0.0)

    def _make_gradient(self, place: int, number: int, storage: Storage) -> None:
        """Add a gradient; with fsdp, a whole one, until the next group begins."""
        if self._goes_apart(storage):
            if storage.group != self._sent.group:
                self._send_group()
            self._add(number, storage.size)
            self._sent.add(number, storage)
            return
        self._add(number, storage.size)
        self._sent.fill(storage.size)
        if place in self._sent.lasts:
            self._see(self._sent.open)
            self._sent.end()

    def _send_group(self) -> None:
        """Release a group, and count the memory of its reduce-scatter.

        That is the gradients, a copy of them to send (not of a single one), and the result.
        """
        numbers, size = self._sent.take()
        if numbers:
            self._gathered.release(self._sent.group)
            self._see(size if len(numbers) == 1 else 2 * size)  # a single one needs no copy
            self._sent.under_way = 2 * size
            for number in numbers:
                self._add(number, self._size(number))

    def _finish_gradients(self) -> None:
        self._send_group()
        self._see()
        self._sent.end()

    def _use(self, number: int) -> None:
        storage = self._record.storages[number]
        if self._goes_apart(storage):
            if self._is_backward and storage.group != self._sent.group:
                self._send_group()
            whole = self._gathered.use(storage.group)
            self._peak = max(self._peak, self._now + self._cast_size() + self._sent.size + whole)

    def _add(self, number: int, size: float) -> None:
        self._now += size - self._held.get(number, 0.0)
        self._held[number] = size

    def _goes_apart(self, storage: Storage) -> bool:
        return self._is_sharded and storage.group >= 0 and storage.largest >= self._layout.holders

    def _size(self, number: int) -> float:
        """Return the bytes of a storage on a device of the layout."""
        storage = self._record.storages[number]
        if storage.scope == "rows":
            return storage.size * self._share
        if storage.scope in ("parameter", "gradient", "state") and self._goes_apart(storage):
            return storage.size / self._layout.holders
        if storage.scope == "optimizer" and self._is_sharded:
            return storage.size / self._layout.holders
        return storage.size

    # --- activation checkpointing

    def _hide(self, call: int) -> None:
        """Count the storages as freed that a call of a block has made and not returned: its activations."""
        inner = {number for number in self._recomputed[call] if number in self._held}
        for number in inner:
            self._now -= self._held[number]
            self._hidden[number] = call, inner

    def _restore(self, number: int) -> None:
        """Count a block's activations as allocated again: they are recomputed, and this one is freed."""
        _, inner = self._hidden[number]
        for one in inner:
            self._hidden.pop(one)
            self._now += self._held[one]
        self._see()


class _Sent:
    """Counts the bytes of the buffers in which gradients are communicated, in the replay of a record.

    lasts: for each step, the index in the record's events at which its last gradient is made.
    """

    def __init__(self, record: MemoryRecord) -> None:
        self.group, self.under_way = -1, 0.0
        self.full, self.open = 0.0, 0.0  # bytes of buckets that have been sent, and of the one that is being filled
        self._numbers: list[int] = []
        self._bytes = 0.0
        self.lasts: set[int] = set()
        last = None
        for place, (what, number) in enumerate(record.events):
            if what == "made" and record.storages[number].scope == "gradient":
                last = place
            elif what == "step" and last is not None:
                self.lasts.add(last)

    @property
    def size(self) -> float:
        """Bytes that the communication buffers hold now, in addition to the gradients themselves."""
        return self.under_way + self.full

    def fill(self, size: int) -> None:
        """Copy a gradient to a bucket, which is sent when the next one does not fit in."""
        if self.open + size > BUCKET_BYTES:
            self.full, self.open = self.full + self.open, 0.0
        self.open += size

    def add(self, number: int, storage: Storage) -> None:
        """Add a gradient to those of its group."""
        self.group = storage.group
        self._numbers.append(number)
        self._bytes += storage.size

    def take(self) -> tuple[list[int], float]:
        """Return the gradients of the group, and their bytes."""
        found = self._numbers, self._bytes
        self._numbers, self._bytes = [], 0.0
        return found

    def end(self) -> None:
        """Note that the backward pass ends."""
        self.under_way = self.full = self.open = 0.0


def _groups(record: MemoryRecord, devices: int) -> tuple[dict[int, int], int, set[int]]:
    """Return the bytes of the parameters of each group that are divided; the devices; the groups of one parameter."""
    sizes: dict[int, list[int]] = {}
    for number in record.alive:
        storage = record.storages[number]
        if storage.scope == "parameter" and storage.group >= 0 and storage.largest >= devices:
            sizes.setdefault(storage.group, []).append(storage.size)
    single = {group for group, own in sizes.items() if len(own) == 1}
    return {group: sum(own) for group, own in sizes.items()}, devices, single


def _recomputed(record: MemoryRecord) -> dict[int, list[int]]:
    """Return what each call of a block has made, and neither returned nor freed, when it ends."""
    alive: dict[int, set[int]] = {}
    found: dict[int, list[int]] = {}
    for what, number in record.events:
        call = record.storages[number].call if what in ("made", "freed") else -1
        if what == "made" and call >= 0:
            alive.setdefault(call, set()).add(number)
        elif what == "freed" and call in alive:
            alive[call].discard(number)
        elif what == "leave":
            left = alive.pop(number, set()).difference(record.returned.get(number, ()))
            found[number] = [one for one in left if record.storages[one].scope == "rows"]
    return found
