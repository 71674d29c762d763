"""MPI: mpirun or mpiexec of Open MPI; and of MPICH and Intel MPI, whose launcher is Hydra."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace

from duoka.engines.task import Task
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
    machines = machines if machines != 1 or here == count else None
    return _with_address(Task("Open MPI", rank, count, local_rank, here, machines, job=job or "", home=True, how=HOW))


def hydra() -> Task | None:
    """Return Hydra's task; None if it has not started this process. srun also sets PMI_RANK, for Hydra."""
    rank, count = environment.number("PMI_RANK"), environment.number("PMI_SIZE")
    of_slurm = environment.number("SLURM_PROCID"), environment.number("SLURM_STEP_NUM_TASKS")
    if rank is None or count is None or of_slurm == (rank, count):
        return None
    local_rank, here = environment.number("MPI_LOCALRANKID"), environment.number("MPI_LOCALNRANKS")
    local_rank, here = (rank, count) if local_rank is None else (local_rank, here)
    job = environment.variable("PMI_ID") or ""
    return _with_address(Task("MPI", rank, count, local_rank, here, job=job, home=True, how=HYDRAS_HOW))


def _with_address(task: Task) -> Task:
    """Return a task with rank 0's address. MPI does not name its host; a port is enough on one machine."""
    all_here = task.local_rank is None or task.here in (None, task.count)
    job = task.job or (all_here and _starter()) or ""
    port = environment.port_of(zlib.crc32(job.encode())) if job else None
    address = environment.master(port)
    if address is None and port is not None and all_here:
        address = (environment.LOOPBACK, port)
    host, port = address or ("", 0)
    return replace(task, host=host, port=port, job=job)


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
