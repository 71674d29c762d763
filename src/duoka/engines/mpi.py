"""MPI: mpirun or mpiexec of Open MPI; and of MPICH and Intel MPI, whose starter is called Hydra."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from duoka import environment
from duoka.engines.part import Local, Part

HOW = "mpirun --map-by ppr:1:node duoka run train.py"
HYDRAS_HOW = "mpiexec -ppn 1 duoka run train.py"
STARTERS = frozenset({"hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "prted", "prterun"})


def open_mpi() -> Part | None:
    """What Open MPI tells; None where it has not started this process."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, count, local_rank, here = (environment.number(f"OMPI_COMM_WORLD_{name}") for name in names)
    if rank is None or count is None:
        return None
    machines = environment.number("OMPI_MCA_orte_num_nodes")
    job = environment.variable("PMIX_NAMESPACE") or environment.variable("OMPI_MCA_ess_base_jobid")
    local = None if local_rank is None else Local(local_rank, here)
    return _part("Open MPI", rank, count, local, machines if machines != 1 or here == count else None, job, HOW)


def hydra() -> Part | None:
    """What Hydra tells; None where it has not started this process. srun, too, sets PMI_RANK for it to tell."""
    rank, count = environment.number("PMI_RANK"), environment.number("PMI_SIZE")
    of_slurm = environment.number("SLURM_PROCID"), environment.number("SLURM_STEP_NUM_TASKS")
    if rank is None or count is None or of_slurm == (rank, count):
        return None
    local_rank, here = environment.number("MPI_LOCALRANKID"), environment.number("MPI_LOCALNRANKS")
    local = Local(rank, count) if local_rank is None else Local(local_rank, here)
    return _part("MPI", rank, count, local, None, environment.variable("PMI_ID"), HYDRAS_HOW)


def _part(
    engine: str, rank: int, count: int, local: Local | None, machines: int | None, job: str | None, how: str
) -> Part:
    """MPI does not say where rank 0 is, unless all are on one machine: then a port of the job's own is enough."""
    all_here = local is None or local.count in (None, count)
    if job is None and all_here:
        job = _starter()
    port = None if job is None else environment.port_of(zlib.crc32(job.encode()))
    place = environment.master(port)
    if place is None and port is not None and all_here:
        place = (environment.LOOPBACK, port)
    host, port = place or ("", 0)
    return Part(engine, rank, count, local, machines, host, port, job=job or "", home=True, how=how)


def _starter() -> str | None:
    """The process of MPI's that started all ranks of this machine: the nearest above this one."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(") ")
        except OSError:
            return None
        if name in STARTERS:
            return f"{name} {pid}"
        pid = int(fields.split()[1])
    return None
