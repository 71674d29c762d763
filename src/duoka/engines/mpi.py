"""MPI: mpirun or mpiexec of Open MPI; and of MPICH and Intel MPI, whose launcher is Hydra."""

from __future__ import annotations

import os
import zlib

from duoka.engines.task import LocalRank, Task
from duoka.system import environment
from duoka.system.processes import process_stat

HOW = "mpirun --map-by ppr:1:node duoka run train.py"
HYDRAS_HOW = "mpiexec -ppn 1 duoka run train.py"
STARTERS = frozenset({"hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "prted", "prterun"})


def open_mpi() -> Task | None:
    """Return Open MPI's task; None if it has not started this process."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, count, local_rank, here = (environment.number(f"OMPI_COMM_WORLD_{name}") for name in names)
    if rank is None or count is None:
        return None
    machines = environment.number("OMPI_MCA_orte_num_nodes")
    job = environment.variable("PMIX_NAMESPACE") or environment.variable("OMPI_MCA_ess_base_jobid")
    local = None if local_rank is None else LocalRank(local_rank, here)
    return _task("Open MPI", rank, count, local, machines if machines != 1 or here == count else None, job, HOW)


def hydra() -> Task | None:
    """Return Hydra's task; None if it has not started this process. srun also sets PMI_RANK, for Hydra."""
    rank, count = environment.number("PMI_RANK"), environment.number("PMI_SIZE")
    of_slurm = environment.number("SLURM_PROCID"), environment.number("SLURM_STEP_NUM_TASKS")
    if rank is None or count is None or of_slurm == (rank, count):
        return None
    local_rank, here = environment.number("MPI_LOCALRANKID"), environment.number("MPI_LOCALNRANKS")
    local = LocalRank(rank, count) if local_rank is None else LocalRank(local_rank, here)
    return _task("MPI", rank, count, local, None, environment.variable("PMI_ID"), HYDRAS_HOW)


def _task(
    engine: str, rank: int, count: int, local: LocalRank | None, machines: int | None, job: str | None, how: str
) -> Task:
    """Create a task. MPI does not name rank 0's host; if all tasks are on one machine, a port suffices."""
    all_here = local is None or local.count in (None, count)
    if job is None and all_here:
        job = _starter()
    port = None if job is None else environment.port_of(zlib.crc32(job.encode()))
    address = environment.master(port)
    if address is None and port is not None and all_here:
        address = (environment.LOOPBACK, port)
    host, port = address or ("", 0)
    return Task(engine, rank, count, local, machines, host, port, job=job or "", home=True, how=how)


def _starter() -> str | None:
    """Return the nearest ancestor that is a launcher of MPI, which started all tasks of this machine."""
    pid = os.getppid()
    while pid > 1:
        stat = process_stat(pid)
        if stat is None:
            return None
        if stat.name in STARTERS:
            return f"{stat.name} {pid}"
        pid = stat.parent
    return None
