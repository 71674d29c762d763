"""How this process was started, and so which rank it is: one file for each way.

forked     by `duoka run` or `duoka.launch`, which hand over everything themselves
grouped    torch.distributed is initialized already, by Ray Train or by the script
started    by an engine: torchrun, mpirun, srun, jsrun, Kubernetes (`duoka.engines`)
alone      by nobody: `python train.py`
"""

from __future__ import annotations

from duoka.origins.base import Origin
from duoka.origins.grouped import Grouped
from duoka.origins.single import SingleProcess
from duoka.origins.started import Started

__all__ = ["Origin", "find"]

ORIGINS: tuple[type[Origin], ...] = (Grouped, Started, SingleProcess)


def find() -> Origin:
    """What the surroundings of this process tell.

    Raises:
        OptionError: they contradict themselves.
    """
    return next(origin for kind in ORIGINS if (origin := kind.found()) is not None)
