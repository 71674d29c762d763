"""Started by srun: the variables of the job step."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka import slurm
from duoka.origins.base import Origin, tcp_store


@dataclass(frozen=True)
class Slurm(Origin):
    """One task of a job step."""

    step: slurm.Step

    @classmethod
    def found(cls) -> Slurm | None:
        step = slurm.step()
        return None if step is None else cls(step.rank, step.tasks, step.local_rank, step)

    def store(self, timeout: float) -> Store:
        return tcp_store(self.rank, *self.step.place(), timeout, is_master=self.rank == 0)
