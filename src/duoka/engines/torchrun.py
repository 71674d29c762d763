"""torchrun, and launchers that set all of its variables, such as Ray Train."""

from __future__ import annotations

from duoka.engines.task import Task
from duoka.system import environment

NAME = "torchrun"
HOW = "torchrun --nnodes 2 --nproc-per-node 1 -m duoka run train.py"


def find() -> Task | None:
    """Return torchrun's task; None if it has not started this process, or the variables are duoka's own."""
    rank, count, local_rank = map(environment.number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    run = environment.variable("TORCHELASTIC_RUN_ID")
    if rank is None or count is None or local_rank is None or environment.is_duokas_own(run):
        return None
    machines = environment.number("GROUP_WORLD_SIZE")
    host, port = environment.master() or ("", 0)
    return Task(
        NAME,
        rank,
        count,
        local_rank,
        environment.number("LOCAL_WORLD_SIZE"),
        machines,
        host,
        port,
        job=run or "",
        store=environment.variable("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.number("TORCHELASTIC_RESTART_COUNT") or 0,
        home=machines == 1,
        how=HOW,
    )
