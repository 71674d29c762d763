"""How this process was started, and so which rank it is: one file for each way.

forked     by `duoka run` or `duoka.launch`, which hand over everything themselves
torchrun   by torchrun, or by anything else that sets RANK and WORLD_SIZE
slurm      by srun
mpi        by mpirun or mpiexec
alone      by nobody: `python train.py`
"""

from __future__ import annotations

from duoka.origins.alone import Alone
from duoka.origins.base import Origin
from duoka.origins.mpi import Mpi
from duoka.origins.slurm import Slurm
from duoka.origins.torchrun import Torchrun

__all__ = ["Origin", "find"]

# In this order: srun may start torchrun, whose word is then the later one.
ORIGINS: tuple[type[Origin], ...] = (Torchrun, Mpi, Slurm, Alone)


def find() -> Origin:
    """What the surroundings of this process tell.

    Raises:
        OptionError: they contradict themselves.
    """
    return next(origin for kind in ORIGINS if (origin := kind.found()) is not None)
