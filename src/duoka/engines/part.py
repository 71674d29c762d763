"""What an engine tells a process that it started: which one of how many it is, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from duoka.errors import OptionError

DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True, slots=True)
class Local:
    """One process among those of its machine: number `rank` of `count`; None: nobody says how many."""

    rank: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Process number `rank` of the `count` that an engine has started for one job.

    engine: its name. job: what tells this job and this start of it from others, equal on all of its processes.
    local: its place on its machine; None: the engine does not say. machines: how many there are; None likewise.
    host, port: where process 0 can be reached; an empty host: the engine does not say.
    store: whether torch's store of the engine's own is at that place. attempt: how often the engine has started its
    processes again. home: whether all machines of the job have the user's home directory in common.
    how: the words by which its user starts so many processes on each machine: `srun --ntasks-per-node 1`.
    """

    engine: str
    rank: int
    count: int
    local: Local | None = None
    machines: int | None = None
    host: str = ""
    port: int = 0
    job: str = ""
    store: bool = False
    attempt: int = 0
    home: bool = False
    how: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            self.refuse("the rank", self.rank, f"from 0 to {self.count - 1}")
        local = self.local
        here = None if local is None else local.count or local.rank + 1
        if local is not None and here is not None and not 0 <= local.rank < here <= self.count:
            given = f"{local.rank} of {here} on its machine, and {self.count} in all"
            self.refuse("the local rank", given, "one of those of its machine")
        if self.local is None and self.machines not in (None, self.count):
            self.refuse(
                "the number of processes", f"{self.count} on {self.machines} machines", "one for each machine"
            )
        if self.machines is not None and not 1 <= self.machines <= self.count:
            given = f"{self.count} on {self.machines} machines"
            self.refuse("the number of processes", given, "at least one for each machine")

    @property
    def each(self) -> Literal["machine", "rank"]:
        """For what each process stands: a `machine`, whose workers it starts, or a `rank`.

        One process on a machine starts the workers for its devices; several are a rank each.
        """
        if self.local is None or (self.local.count == 1 and self.machines in (None, self.count)):
            return "machine"
        return "rank"

    def refuse(self, what: str, given: object, allowed: str) -> NoReturn:
        """Say that what the engine tells makes no sense, and what to type instead.

        Raises:
            OptionError: always.
        """
        lines = f"{self.how or 'the engine'} starts one for each machine; --machines 1 makes each a run of its own"
        raise OptionError(f"{what} that {self.engine} tells", given, allowed, lines)
