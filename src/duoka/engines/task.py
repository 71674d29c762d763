"""One of the processes that a launcher has started for a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from duoka.errors import OptionError

DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True, slots=True)
class Task:
    """Task number `rank` of the `count` that a launcher has started for one job.

    engine: the launcher's name. job: a text that names this job and this start of it, equal in all of its tasks.
    local_rank: number among the `here` tasks of its machine. machines: number of machines. None: unknown.
    host, port: address of task 0; an empty host: unknown.
    store: the launcher's own torch store is at that address. attempt: number of restarts by the launcher.
    home: all machines of the job share the user's home directory.
    how: a command that starts one task on each machine: `srun --ntasks-per-node 1`.
    """

    engine: str
    rank: int
    count: int
    local_rank: int | None = None
    here: int | None = None
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
        local = self.local_rank
        if local is not None and not 0 <= local < (here := self.here or local + 1) <= self.count:
            claim = f"{local} of {here} on its machine, and {self.count} in all"
            self.refuse("the local rank", claim, "one of those of its machine")
        if local is None and self.machines not in (None, self.count):
            self.refuse(
                "the number of processes", f"{self.count} on {self.machines} machines", "one for each machine"
            )
        if self.machines is not None and not 1 <= self.machines <= self.count:
            claim = f"{self.count} on {self.machines} machines"
            self.refuse("the number of processes", claim, "at least one for each machine")

    @property
    def each(self) -> Literal["machine", "rank"]:
        """The role of each task: a `machine`, whose workers it starts, or a `rank`.

        One task on a machine starts workers for its devices; several on a machine are one rank each.
        """
        if self.local_rank is None or (self.here == 1 and self.machines in (None, self.count)):
            return "machine"
        return "rank"

    def refuse(self, what: str, claim: object, allowed: str) -> NoReturn:
        """Raise an error about contradictory variables.

        Raises:
            OptionError: always.
        """
        lines = f"{self.how or 'the engine'} starts one for each machine; --machines 1 makes each a run of its own"
        raise OptionError(f"{what} set by {self.engine}", claim, allowed, lines)
