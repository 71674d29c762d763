"""State of this process as a whole: the only mutable state that belongs to no object.

torch can be intercepted only once in a process, so one run is open at a time; and a worker's rank is set by the
process that forked it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a script with its own torch.distributed needs none of it
    import torch
    from torch import Tensor

    from duoka.origins.origin import Communication, Origin


class OpenRun(Protocol):
    """The part of an open run (`duoka.run.Run`) that lower modules use."""

    rank: int
    world_size: int
    device: torch.device

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in the order of ranks. All ranks call it."""

    def batch(self, tensor: Any) -> Tensor:
        """Return a batch tensor of a tensor that is equal on all ranks: each computes its own rows."""

    def close(self, wait: bool = True) -> None:
        """Close the run. wait: for the other ranks."""


@dataclass(slots=True)
class Process:
    """State of a process; what is called is set by who publishes the progress of the script."""

    origin: Origin | None = None  # rank and settings, in workers forked by duoka
    communication: Communication | None = None  # the connections to other ranks, shared by all runs of this process
    run: OpenRun | None = None  # the open one
    runs: int = 0  # opened so far
    saved: Callable[[int], None] = lambda step: None  # called with the step of each checkpoint
    # Called with the step, or None, and the values of each `run.log`; None: nobody reads them.
    logged: Callable[[int | None, Mapping[str, object]], None] | None = None
    # Called for each batch of the API's loaders that none of torch's has read; of: how many there are.
    took: Callable[[int, int, int, int], None] = lambda nanoseconds, samples, number, of: None
    # Called for each epoch of `Checkpoint.epochs`; done: epochs before it.
    began_epoch: Callable[[int, int], None] = lambda done, count: None

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within the context, run a script; close the run that it leaves open, after an error without waiting.

        A process forked within closes nothing.
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
                self.run.close(wait=well)  # after an error the others may never come


@cache
def this_process() -> Process:
    """Return the state of this process. A forked worker calls `this_process.cache_clear()`."""
    return Process()
