"""The record of memory in a few steps of a script on one device: one file, written and read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from duoka.trials.observer import opened

FILE = "memory.json"

Scope = Literal["parameter", "gradient", "state", "optimizer", "rows", "constant", "kept"]
What = Literal["made", "freed", "used", "enter", "leave", "step", "stepped", "backward", "forward"]


class Storage(NamedTuple):
    """The memory of tensors.

    scope: parameter, gradient, state of an optimizer; "optimizer": needed only during its step; "rows": grows with
    the batch; "constant": does not; "kept": made before the first step, and not part of a model. group: of parameters
    that fsdp gathers together, of a copy of one, too; -1 for what it does not shard. largest: the size of the
    parameter's largest dimension. call: the call of a block in which it was made; -1: in none.
    """

    size: int
    scope: Scope
    group: int = -1
    largest: int = 0
    call: int = -1


class MemoryEvent(NamedTuple):
    """A moment.

    what: "made" or "freed", "used" (a parameter, in a computation), "enter" or "leave" (a block's forward pass),
    "step" or "stepped" (the begin and end of an optimizer's step), "backward" or "forward" (the pass, from here on).
    number: of the storage, or of the block's call.
    """

    what: What
    number: int


@dataclass
class MemoryRecord:
    """The record of one run.

    batch: samples in a step's batch; None if they could not be counted. bound: bytes that one device needs at most,
    computed from the first step. alive: numbers of the storages at the first event. returned: call of a block ->
    numbers of the storages that it returned.
    """

    steps: int = 0
    batch: int | None = None
    bound: int = 0
    storages: dict[int, Storage] = field(default_factory=dict)
    alive: list[int] = field(default_factory=list)
    events: list[MemoryEvent] = field(default_factory=list)
    returned: dict[int, list[int]] = field(default_factory=dict)


def write(folder: Path, record: MemoryRecord) -> None:
    """Write the record of a run."""
    with opened(folder / FILE) as file:
        file.write(json.dumps(asdict(record)))


def read(folder: Path) -> MemoryRecord:
    """Read the record of a run that succeeded."""
    found = json.loads((folder / FILE).read_text())
    return MemoryRecord(
        steps=found["steps"],
        batch=found["batch"],
        bound=found["bound"],
        storages={int(number): Storage(*storage) for number, storage in found["storages"].items()},
        alive=found["alive"],
        events=[MemoryEvent(*event) for event in found["events"]],
        returned={int(call): numbers for call, numbers in found["returned"].items()},
    )
