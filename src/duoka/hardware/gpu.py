"""A device; a GPU and its users, at one moment. Values that the driver does not report are None."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine."""

    type: str  # as torch calls it
    index: int | None = None  # physical; None for a CPU worker
    name: str = ""
    uuid: str = field(default="", compare=False)  # of a GPU, or of a part of one
    part: int | None = None  # number of the part, of a GPU that is split (MIG)

    def __str__(self) -> str:
        """The name shown to users: `GPU 3`, `GPU 3:0` (a part), `CPU`."""
        return "CPU" if self.index is None else f"GPU {self.number}"

    @property
    def number(self) -> str:
        """The number as in `duoka gpus`: `3`, and `3:0` for a part; empty for a CPU worker."""
        return "" if self.index is None else str(self.index) if self.part is None else f"{self.index}:{self.part}"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    kind: Literal["compute", "graphics"]
    memory: int | None = None  # bytes on that GPU
    user: str = ""  # user and command: empty if not visible
    command: str = ""
    since: float | None = None  # its start, in seconds since 1970
    run: str = ""  # its rank in a run of duoka of the same user; empty if in none


@dataclass(frozen=True, slots=True)
class Holder:
    """The duoka process that has locked a GPU, or waits for it."""

    pid: int
    command: str
    since: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a part of a GPU that is split (MIG)."""

    index: int  # number as the driver's program numbers them; of a part, its number within its GPU
    uuid: str
    name: str
    memory: int  # bytes
    used: int | None = None
    utilisation: int | None = None  # percent
    temperature: int | None = None  # °C
    power: float | None = None  # watts
    power_limit: float | None = None
    # None: the driver does not report them; a container often sees none of those outside.
    processes: tuple[GpuProcess, ...] | None = None
    is_split: bool = False
    parts: tuple[Gpu, ...] = ()  # of a split GPU, which is used through its parts only
    holder: Holder | None = None  # the duoka run of the same user that has locked it
    awaited: Holder | None = None  # the duoka run that queues for it before this process
    card: int | None = None  # of a part, the number of its GPU
    capability: str = ""  # which code it runs, such as 9.0; empty if unknown
    problem: str = ""  # a fault that the driver reports; such a GPU is shown and not used
    speed: int = 0  # number of cores times their clock (MHz); 0 if unknown

    @property
    def number(self) -> str:
        """The number as in `duoka gpus`: 3, and 3:0 for a part."""
        return str(self.index) if self.card is None else f"{self.card}:{self.index}"

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: parts follow their GPU."""
        return (self.index, -1) if self.card is None else (self.card, self.index)

    @property
    def free_memory(self) -> int:
        """Free bytes, as far as the driver reports them."""
        return self.memory - (self.used or 0)
