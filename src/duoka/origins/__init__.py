"""Find out how this process was started, and so its rank: one file for each way.

forked     by `duoka run` or `duoka.launch`, which set everything
grouped    torch.distributed is initialized already, by Ray Train or by the script
started    by an engine: torchrun, mpirun, srun, jsrun, Kubernetes (`duoka.engines`)
single     as one process: `python train.py`
"""

from __future__ import annotations

from duoka.origins.base import Origin
from duoka.origins.grouped import Grouped
from duoka.origins.single import SingleProcess
from duoka.origins.started import Started

__all__ = ["Origin", "find"]

ORIGINS: tuple[type[Origin], ...] = (Grouped, Started, SingleProcess)


def find() -> Origin:
    """Return the origin of this process, from its environment.

    Raises:
        OptionError: environment variables contradict each other.
    """
    return next(origin for kind in ORIGINS if (origin := kind.found()) is not None)
