"""Slurm: variables that srun sets for the tasks of a job step."""

from __future__ import annotations

import re

from duoka.engines.task import Task
from duoka.errors import OptionError
from duoka.system import environment

NAME = "Slurm"
HOW = "srun --ntasks-per-node 1 duoka run train.py"


def find() -> Task | None:
    """Return srun's task; None outside of a job step.

    In `salloc`, and in a batch script without srun, the job's variables are set, but the process is the only one.
    Raises OptionError if the variables do not name the first task's machine.
    """
    tasks, rank = environment.number("SLURM_STEP_NUM_TASKS"), environment.number("SLURM_PROCID")
    if environment.number("SLURM_STEP_ID") is None or tasks is None or rank is None:
        return None
    machines = environment.number("SLURM_STEP_NUM_NODES") or environment.number("SLURM_NNODES") or 1
    local_rank, here = environment.number("SLURM_LOCALID"), _here()
    here = here if here is not None and here > (local_rank or 0) else None
    host, port = _address() if tasks > 1 else ("", 0)
    job = f"{environment.variable('SLURM_JOB_ID')}.{environment.variable('SLURM_STEP_ID')}"
    start = environment.number("SLURM_RESTART_COUNT") or 0
    return Task(NAME, rank, tasks, local_rank, here, machines, host, port, job=f"{job}.{start}", home=True, how=HOW)


def idle_machines() -> int:
    """Return how many machines of a batch script's allocation a command does not use, as srun did not start it."""
    if environment.number("SLURM_JOB_ID") is None or environment.number("SLURM_STEP_ID") is not None:
        return 0
    return max(0, (environment.number("SLURM_JOB_NUM_NODES") or environment.number("SLURM_NNODES") or 1) - 1)


def _here() -> int | None:
    """Return the number of tasks on this machine, from Slurm's short form for all machines: `2(x3),1`."""
    every = environment.variable("SLURM_STEP_TASKS_PER_NODE")
    if every is None:
        return None
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", every) for _ in range(int(times or 1))
    ]
    node = environment.number("SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _address() -> tuple[str, int]:
    """Return an address for all tasks of the step: the first task's machine and a port."""
    job, step = environment.number("SLURM_JOB_ID") or 0, environment.number("SLURM_STEP_ID") or 0
    port = environment.port_of(job * 16 + step)
    nodes = environment.variable("SLURM_STEP_NODELIST") or environment.variable("SLURM_JOB_NODELIST")
    return environment.master(port) or (first_node(nodes or environment.LOOPBACK), port)


def first_node(nodes: str) -> str:
    """Return the first name in Slurm's short form of a node list: `gpu003` for `gpu[003-005,9],cpu1`.

    Raises OptionError if the text is no such list.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise OptionError("SLURM_STEP_NODELIST", nodes, "a list of nodes", "or set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
