"""One GPU and who uses it, as somebody found them at one moment. A figure that the driver does not tell is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a GPU. memory: bytes on that GPU. user, command: empty where they cannot be seen."""

    pid: int
    kind: Literal["compute", "graphics"]
    memory: int | None = None
    user: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process of duoka that has taken a GPU, or waits for it. since: in seconds since 1970."""

    pid: int
    command: str
    since: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one part of a GPU that is split (MIG).

    index: its number in PCI bus order, which is nvidia-smi's; of a part, its number within its GPU.
    card: of a part, the number of its GPU. capability: of CUDA, such as 9.0; empty where the driver does not tell.
    memory, used: bytes. utilisation: percent. temperature: °C. power, power_limit: watts.
    processes: None where the driver does not tell; a container often sees none of those outside of it.
    parts: what a GPU is split into; one that is split is used through its parts only.
    holder: the run of duoka, of the same user, that it belongs to.
    awaited: the one that waits for it and came before whoever is looking.
    problem: what the driver says is wrong with it; such a GPU is shown and not used.
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
    processes: tuple[Process, ...] | None = None
    is_split: bool = False
    parts: tuple[Gpu, ...] = ()
    holder: Holder | None = None
    awaited: Holder | None = None
    card: int | None = None
    capability: str = ""
    problem: str = ""

    @property
    def number(self) -> str:
        """As `duoka gpus` shows it: 3, and 3:0 for a part."""
        return str(self.index) if self.card is None else f"{self.card}:{self.index}"

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands among all, to sort by."""
        return (self.index, -1) if self.card is None else (self.card, self.index)

    @property
    def free_memory(self) -> int:
        """Bytes that are free, as far as the driver tells."""
        return self.memory - (self.used or 0)
