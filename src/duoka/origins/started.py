"""A process started by an engine (torchrun, mpirun, srun, ...), which has set its rank in the environment."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from duoka import engines
from duoka.engines import Task
from duoka.errors import MISSING, OptionError
from duoka.origins.base import Origin, reach_tcp_store


@dataclass(frozen=True)
class Started(Origin):
    """One of the processes that an engine has started. task: its number, and the address of the first process."""

    task: Task

    @classmethod
    def found(cls) -> Started | None:
        task = engines.find()
        return None if task is None else cls(task.rank, task.count, task.local.rank if task.local else 0, task)

    def store(self, timeout: float) -> Store:
        task = self.task
        if not task.host or not task.port:
            hint = f"{task.engine} does not set them; for example: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {task.count} ranks", hint)
        store = reach_tcp_store(task.rank, task.host, task.port, timeout, is_master=task.rank == 0 and not task.store)
        # A prefix for each attempt: the engine's own store keeps the addresses of dead ranks.
        return PrefixStore(f"duoka/attempt{task.attempt}", store)
