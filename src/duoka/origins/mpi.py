"""Started by mpirun or mpiexec: Open MPI's variables, or those of MPICH and Intel MPI."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka import environment
from duoka.errors import MISSING, OptionError
from duoka.origins.base import Origin, tcp_store

# (rank, size, local rank, local size)
NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # what no other job has, the same on all machines
STARTERS = frozenset({"hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "prted", "prterun"})


@dataclass(frozen=True)
class Mpi(Origin):
    """One process of an MPI job. here: how many of them are on this machine; None where nobody says."""

    here: int | None

    @classmethod
    def found(cls) -> Mpi | None:
        for names in NAMES:
            rank, size, local_rank, local_size = map(environment.number, names)
            if rank is not None and size is not None:
                return cls(rank, size, rank if local_rank is None else local_rank, local_size)
        return None

    def store(self, timeout: float) -> Store:
        job = next((value for name in JOBS if (value := environment.variable(name))), None)
        here = self.here in (None, self.world_size)
        if job is None and here:
            job = _starter()
        port = None if job is None else environment.port_of(zlib.crc32(job.encode()))
        place = environment.master(port)
        if place is None and port is not None and here:
            place = ("127.0.0.1", port)
        if place is None:
            hint = "for example: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
            names = "MASTER_ADDR and MASTER_PORT"
            raise OptionError(names, MISSING, "set: mpirun does not say where rank 0 is", hint)
        return tcp_store(self.rank, *place, timeout, is_master=self.rank == 0)


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
