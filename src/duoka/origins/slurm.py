"""Started by srun: the variables of the job step."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka import environment
from duoka.errors import OptionError
from duoka.origins.base import Origin, master, port_of, tcp_store


@dataclass(frozen=True)
class Slurm(Origin):
    """One task of a job step.

    Only a step has tasks that know of each other: in `salloc`, and in a batch script without srun, the same job
    variables are set, but the process is alone.
    """

    @classmethod
    def found(cls) -> Slurm | None:
        tasks, rank = environment.number("SLURM_STEP_NUM_TASKS"), environment.number("SLURM_PROCID")
        if environment.number("SLURM_STEP_ID") is None or tasks is None or rank is None:
            return None
        return cls(rank, tasks, environment.number("SLURM_LOCALID") or 0)

    def store(self, timeout: float) -> Store:
        job, step = environment.number("SLURM_JOB_ID") or 0, environment.number("SLURM_STEP_ID") or 0
        port = port_of(job * 16 + step)
        nodes = environment.variable("SLURM_STEP_NODELIST") or environment.variable("SLURM_JOB_NODELIST")
        address, port = master(port) or (first_node(nodes or "127.0.0.1"), port)
        return tcp_store(self.rank, address, port, timeout, is_master=self.rank == 0)


def first_node(nodes: str) -> str:
    """The first name in Slurm's short form of a list: `gpu[003-005,9],cpu1` begins with `gpu003`.

    Raises:
        OptionError: there is no name in it.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise OptionError("SLURM_STEP_NODELIST", nodes, "a list of nodes", "or set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
