"""What belongs to this process as a whole, and is therefore the only state that belongs to no object.

torch can be intercepted once in a process, so one run is open at a time; and which worker a process is, it was told
by whoever forked it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a script with its own torch.distributed needs none of it
    import torch
    from torch import Tensor

    from duoka.origins import Origin
    from duoka.origins.meeting import Meeting


class Open(Protocol):
    """A run that is going on (`duoka.run.Run`)."""

    rank: int
    world_size: int
    device: torch.device

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks. All ranks call it."""

    def close(self, wait: bool = True) -> None:
        """End it; the others are waited for, if `wait`."""

    def has_held(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient of these is this rank's own."""


@dataclass(slots=True)
class Process:
    """origin: set in workers that duoka forked. meeting: where this process met the others, once for all runs.

    saved: told the step of each checkpoint that is on the disk.
    """

    origin: Origin | None = None
    meeting: Meeting | None = None
    run: Open | None = None
    runs: int = 0  # opened so far
    saved: Callable[[int], None] = lambda step: None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around a script or a function: the run that it leaves open is closed; an error waits for nobody.

        A process that was forked within, and comes to the end of it, closes nothing.
        """
        well, home = False, os.getpid()
        try:
            yield
            well = True
        except SystemExit as error:
            well = not error.code
            raise
        finally:
            if self.run is not None and os.getpid() == home:
                self.run.close(wait=well)


@cache
def this_process() -> Process:
    """The one object of this kind. A forked worker begins with a fresh one (`this_process.cache_clear()`)."""
    return Process()
