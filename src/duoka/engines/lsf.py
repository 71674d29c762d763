"""LSF: variables that jsrun sets for its tasks."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path

from duoka.engines.task import Task
from duoka.system import environment

NAME = "LSF"
HOW = "jsrun --rs_per_host 1 duoka run train.py"


def find() -> Task | None:
    """Return jsrun's task; None if jsrun has not started this process."""
    rank, count = environment.number("JSM_NAMESPACE_RANK"), environment.number("JSM_NAMESPACE_SIZE")
    if rank is None or count is None:
        return None
    names = ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    local_rank, here = map(environment.number, names)
    job = f"{environment.variable('LSB_JOBID')} {environment.variable('JSM_NAMESPACE_ID')}"
    port = environment.port_of(zlib.crc32(job.encode()))
    hosts = _hosts()
    address = environment.master(port) or (hosts[0] if hosts else "", port)
    return Task(NAME, rank, count, local_rank, here, len(hosts) or None, *address, job=job, home=True, how=HOW)


def _hosts() -> list[str]:
    """Return the job's hosts, in the order of ranks. The file's first line is the host of the batch script."""
    path = environment.variable("LSB_DJOB_RANKFILE")
    with suppress(OSError):
        if path is not None:
            return list(dict.fromkeys(Path(path).read_text().split()[1:]))
    return []
