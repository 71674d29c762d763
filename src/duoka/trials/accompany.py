"""Beside the script, in every worker: it is seeded, what it writes goes to a scratch folder, and it is ended in time.

What is looked at meanwhile is each command's own (`Watch`).
"""

from __future__ import annotations

import _thread  # a thread of the threading module would be waited for
import json
import os
import posix
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import numpy as np
import torch

from duoka import environment
from duoka.board import Seat
from duoka.origins.forked import Forked
from duoka.private.python import put_sockets_into
from duoka.process import this_process
from duoka.trials.redirecting import redirect
from duoka.trials.scratch import Scratch

END = "end.json"
TO_LEAVE = 10.0  # seconds for threads and atexit functions of a script that was ended

How = Literal["enough", "ended", "failed"]


class Enough(BaseException):
    """All steps that are wanted were made. No `except Exception` of a script's catches it."""


@dataclass(frozen=True)
class Places:
    """The folders of one trial.

    seen: for what is seen of the script. scratch: for what it writes itself. sockets: where multiprocessing keeps
    its own, whose paths must be short.
    """

    seen: Path
    scratch: Path
    sockets: Path


@dataclass(frozen=True)
class End:
    """How a trial ended. how: `enough`: it was ended after all steps that were wanted; `ended`: by itself, well."""

    steps: int
    how: How


class Watch(ABC):
    """What one rank sees of its script. steps: made so far; what counts as one is said by who counts them."""

    def __init__(self, seen: Path, rank: int) -> None:
        self._folder, self._is_first = seen, rank == 0
        self.steps, self.over = 0, False

    @abstractmethod
    def install(self) -> None:
        """Begin to look."""

    @abstractmethod
    def close(self) -> None:
        """Write out what was seen."""

    def enough(self) -> NoReturn:
        """End the script, which has made all steps that are wanted.

        Raises:
            Enough: always, the first time; a script that catches even that is ended at its next step.
        """
        if self.over:
            os._exit(0)
        self.end("enough")
        raise Enough

    def end(self, how: How) -> None:
        """The script has come to an end, of which the first one counts."""
        if not self.over:
            self.over = True
            self.close()
            if self._is_first:
                with opened(self._folder / END) as file:
                    file.write(json.dumps({"steps": self.steps, "how": how}))


@dataclass(frozen=True)
class Companion(ABC):
    """Accompanies the first steps of a script (`duoka.worker.Observer`). A worker is forked with it.

    steps: after how many the script is ended. seed: of all generators, which the script may seed again.
    own_rows: ranks are the script's own, and so are their batches.
    """

    places: Places
    steps: int
    seed: int
    own_rows: bool

    @abstractmethod
    def watch(self, seat: Seat) -> Watch:
        """What looks at the script on the rank that sits there."""

    def begin(self, rank: int) -> None:
        """What the script writes from now on goes to the scratch folder."""
        environment.keep_trackers_quiet()
        put_sockets_into(str(self.places.sockets))
        redirect(Scratch(self.places.scratch))

    @contextmanager
    def around(self, seat: Seat) -> Iterator[None]:
        """Look at what the script does within, and end it when it has made enough steps."""
        self._seed(seat.rank)
        watch = self.watch(seat)
        watch.install()
        try:
            yield
        except Enough:
            _thread.start_new_thread(_leave_at_last, ())
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                with suppress(OSError):  # a full disk must not hide what went wrong
                    watch.end("failed")
                raise
        watch.end("ended")

    def _seed(self, rank: int) -> None:
        seed = self.seed + rank if self.own_rows else self.seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        process = this_process()
        if isinstance(process.origin, Forked):
            process.origin = replace(process.origin, asked=replace(process.origin.asked, seed=seed))


def _leave_at_last() -> None:
    time.sleep(TO_LEAVE)
    os._exit(0)


def opened(path: Path, mode: str = "w") -> IO[Any]:
    """A new file, opened past all that has been made of `open` for the script, on this rank alone."""
    return open(posix.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), mode)


def end_of(seen: Path) -> End | None:
    """How a trial ended; None where its first rank did not come to say so."""
    path = seen / END
    return End(**json.loads(path.read_text())) if path.exists() else None


def replace_function(space: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` makes of a function in its place, in this process."""
    setattr(space, name, make(getattr(space, name)))
