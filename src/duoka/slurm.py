"""What Slurm tells a process of the job step that it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from duoka import environment
from duoka.errors import OptionError
from duoka.options import ONE_MACHINE, Machines


@dataclass(frozen=True, slots=True)
class Step:
    """A job step, seen from one of its tasks: number `rank` of `tasks`, `local_rank` on its machine.

    nodes: how many machines.
    """

    rank: int
    tasks: int
    local_rank: int
    nodes: int

    def place(self) -> tuple[str, int]:
        """Where all tasks of the step can meet: a name of the first one's machine, and a port.

        Raises:
            OptionError: Slurm does not say which machine that is.
        """
        job, step = environment.number("SLURM_JOB_ID") or 0, environment.number("SLURM_STEP_ID") or 0
        port = environment.port_of(job * 16 + step)
        nodes = environment.variable("SLURM_STEP_NODELIST") or environment.variable("SLURM_JOB_NODELIST")
        return environment.master(port) or (first_node(nodes or environment.LOOPBACK), port)


def step() -> Step | None:
    """The job step of this process; None outside of one.

    Only a step has tasks that know of each other: in `salloc`, and in a batch script without srun, the same job
    variables are set, but the process is alone.
    """
    tasks, rank = environment.number("SLURM_STEP_NUM_TASKS"), environment.number("SLURM_PROCID")
    if environment.number("SLURM_STEP_ID") is None or tasks is None or rank is None:
        return None
    nodes = environment.number("SLURM_STEP_NUM_NODES") or environment.number("SLURM_NNODES") or 1
    return Step(rank, tasks, environment.number("SLURM_LOCALID") or 0, nodes)


def machines() -> Machines:
    """The machines of a run whose command srun starts on each of them.

    Raises:
        OptionError: srun has started several on one.
    """
    found = step()
    if found is None or found.tasks == 1:
        return ONE_MACHINE
    if found.tasks != found.nodes:
        hint = "srun --ntasks-per-node 1 starts one; --machines 1 makes each task a run of its own"
        given = f"{found.tasks} on {found.nodes} machine{'s' * (found.nodes > 1)}"
        allowed = "one for each machine, whose workers duoka starts"
        raise OptionError("the number of srun's tasks", given, allowed, hint)
    host, port = found.place()
    return Machines(found.nodes, found.rank, host, port, told_by="Slurm")


def first_node(nodes: str) -> str:
    """The first name in Slurm's short form of a list: `gpu[003-005,9],cpu1` begins with `gpu003`.

    Raises:
        OptionError: there is no name in it.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise OptionError("SLURM_STEP_NODELIST", nodes, "a list of nodes", "or set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
