"""A device; a GPU and its users, at one moment. Values that the driver does not report are None."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine.

    index: physical; None for a CPU worker. uuid: of a GPU, or of a part of one. part: number of the
    part, of a GPU that is split (MIG); else None.
    """

    type: str  # as torch calls it
    index: int | None = None
    name: str = ""
    uuid: str = field(default="", compare=False)
    part: int | None = None

    def __str__(self) -> str:
        """The name shown to users: `GPU 3`, `GPU 3:0` (a part), `CPU`."""
        return "CPU" if self.index is None else f"GPU {self.number}"

    @property
    def number(self) -> str:
        """The number as in `duoka gpus`: `3`, and `3:0` for a part; empty for a CPU worker."""
        return "" if self.index is None else str(self.index) if self.part is None else f"{self.index}:{self.part}"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU.

    memory: bytes on that GPU. user, command: empty if not visible. since: its start, in seconds since 1970. run: its
    rank in a run of duoka of the same user; empty if in none.
    """

    pid: int
    kind: Literal["compute", "graphics"]
    memory: int | None = None
    user: str = ""
    command: str = ""
    since: float | None = None
    run: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The duoka process that has locked a GPU, or waits for it. since: seconds since 1970."""

    pid: int
    command: str
    since: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a part of a GPU that is split (MIG).

    index: number as the driver's program numbers them; of a part, its number within its GPU. card: of a part, the
    number of its GPU. capability: which code it runs, such as 9.0; empty if unknown. memory, used: bytes.
    utilisation: percent. temperature: °C. power, power_limit: watts. processes: None if the driver does not report
    them; a container often sees none of those outside. parts: of a split GPU, which is used through its parts only.
    holder: the duoka run of the same user that has locked it. awaited: the duoka run that queues for it before this
    process. problem: a fault that the driver reports; such a GPU is shown and not used. speed: number of cores times
    their clock (MHz); 0 if unknown.
    """

    index: int
    uuid: str
    name: str
    memory: int
    used: int | None = None
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    is_split: bool = False
    parts: tuple[Gpu, ...] = ()
    holder: Holder | None = None
    awaited: Holder | None = None
    card: int | None = None
    capability: str = ""
    problem: str = ""
    speed: int = 0

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
