"""In each worker of a trial: seed the script, redirect the files it writes, observe it, and end it after some steps.

Each command (forecast, prove) subclasses `TrialObserver` for what it records.
"""

from __future__ import annotations

import _thread  # a thread of the threading module would be waited for
import json
import os
import posix
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from torch.utils.data import DataLoader

from duoka.launchers.worker import Observer
from duoka.origins.origin import Forked
from duoka.origins.process import this_process
from duoka.plain.patching import Patches
from duoka.supervision.status_board import StatusSlot
from duoka.system import environment
from duoka.trials.scratch import Scratch, redirect
from duoka.view.generators import seed_all

END = "end.json"
TO_LEAVE = 10.0  # seconds for threads and atexit functions of a script that was ended

How = Literal["enough", "ended", "failed"]


class StepLimitReached(BaseException):
    """Ends the script after the wanted number of steps. A BaseException, so that no `except Exception` catches it."""


@dataclass(frozen=True)
class TrialEnd:
    """End of a trial."""

    steps: int
    how: How  # "enough": after the wanted steps; "ended": the script ended without error before


class TrialObserver(Observer, ABC):
    """Observes the first steps of a script on a rank. Workers are forked with it."""

    folder: Path  # of the record
    scratch: Path  # for files that the script writes
    slot: StatusSlot

    def __init__(self, wanted: int, seed: int, own_rows: bool = False) -> None:
        self.wanted = wanted  # steps after which the script is ended
        self.seed = seed  # of all generators; the script may seed them again
        self.own_rows = own_rows  # the script calls torch.distributed itself, and each rank makes its own batches
        self.steps, self.over = 0, False  # steps: counted by the subclass

    @abstractmethod
    def install(self) -> None:
        """Install the hooks, in the worker, for good: it ends with the script."""

    @abstractmethod
    def close(self) -> None:
        """Write the record."""

    def begin(self) -> None:
        """Redirect writes of this process to the scratch folder."""
        environment.set_variables({"WANDB_MODE": "disabled"})  # a trial is no run of an experiment
        redirect(Scratch(self.scratch))

    @contextmanager
    def around(self, slot: StatusSlot) -> Iterator[None]:
        """Observe the script while the context is open, and end it after the wanted steps."""
        self.slot = slot
        self._seed()
        self.install()
        try:
            yield
        except StepLimitReached:  # threads of the script may wait for more steps, for ever
            _thread.start_new_thread(_leave_at_last, ())
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                with suppress(OSError):  # a full disk must not hide the script's error
                    self.end("failed")
                raise
        self.end("ended")

    def _seed(self) -> None:
        seed = self.seed + self.slot.rank if self.own_rows else self.seed
        seed_all(seed)
        process = this_process()
        if isinstance(process.origin, Forked):  # what seeds augmentation by sample
            process.origin = replace(process.origin, seed=seed)

    def enough(self) -> NoReturn:
        """End the script by a StepLimitReached; one that catches it ends at its next step."""
        if self.over:  # the script has caught the exception
            os._exit(0)
        self.end("enough")
        raise StepLimitReached

    def end(self, how: How) -> None:
        """Write the record once; rank 0 also writes how the trial ended."""
        if not self.over:
            self.over = True
            self.close()
            if self.slot.rank == 0:
                with opened(self.folder / END) as file:
                    file.write(json.dumps({"steps": self.steps, "how": how}))


def _leave_at_last() -> None:
    time.sleep(TO_LEAVE)
    os._exit(0)


def opened(path: Path, mode: str = "w") -> IO[Any]:
    """Open a new file with the system's own `open`, past the redirection, on this rank alone."""
    # `open` with a descriptor is passed on: only paths are redirected.
    return open(posix.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), mode)


def end_of(seen: Path) -> TrialEnd | None:
    """Read how a trial ended; None if rank 0 wrote nothing."""
    path = seen / END
    return TrialEnd(**json.loads(path.read_text())) if path.exists() else None


def watch_loaders(look: Callable[[Any, Any], None]) -> None:
    """Call `look` with every loader and batch, as the script takes it."""

    def iterate(original: Callable[..., Any], loader: Any) -> Any:
        batches = original(loader)
        if str(sys._getframe(2).f_globals.get("__name__")).startswith("duoka."):
            return batches  # of duoka's own loader, which reports its batches itself
        return _Watched(batches, partial(look, loader))

    Patches().around(DataLoader, "__iter__")(iterate)
    api = sys.modules.get("duoka.data.loader")
    if api is not None:
        Patches().around(api.Loader, "__iter__")(iterate)


class _Watched:
    """An iterator of a loader that calls `look` with every batch."""

    def __init__(self, batches: Any, look: Callable[[Any], None]) -> None:
        self._batches, self._look = iter(batches), look

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._look(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not set yet while copied or unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)
