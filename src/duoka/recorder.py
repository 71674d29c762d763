"""The collectives of a script that calls torch.distributed itself, as torch's flight recorder tells them.

Such a script is left alone, so its calls are not seen one by one. A thread looks twice a second at the counts of
the default group, and at the recorder's entry only of a collective that is there at two looks. A group that the
script makes besides is not followed.
"""

from __future__ import annotations

import _thread  # a thread of the threading module could be seen by the script, and would be waited for
import json
import pickle
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Protocol

from duoka.traces import OURS

PERIOD = 0.5  # seconds between two looks
DEFAULT_GROUP = "0"


class Seat(Protocol):
    """Where the counts are shown (`duoka.board.Seat`)."""

    def mirror(self, begun: int, finished: int, oldest: tuple[int, str, int] | None = None) -> None:
        """Show counts, and what the first unfinished one is."""


def show_on(seat: Seat) -> None:
    """Go on to show on `seat` how far this process has come, from a thread of its own."""
    import torch

    tell_by_device = [
        getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")
    ]
    tellers = [tell for tell in tell_by_device if tell is not None]
    if tellers:
        _thread.start_new_thread(_follow, (seat, tellers))


def _follow(seat: Seat, tellers: list[Callable[..., bytes]]) -> None:
    looks = [Look(tell) for tell in tellers]
    while True:
        time.sleep(PERIOD)
        for look in looks:
            if look.again():
                seat.mirror(look.begun, look.finished, look.oldest)


class Look:
    """One recorder, looked at again and again.

    begun, finished: how many collectives. oldest: what `Seat.mirror` takes.
    """

    def __init__(self, tell: Callable[..., bytes]) -> None:
        self._tell = tell
        self.begun = self.finished = 0
        self.oldest: tuple[int, str, int] | None = None

    def again(self) -> bool:
        """Whether there is something to be shown."""
        # Its own process's memory: no bytes from elsewhere are unpickled.
        status = pickle.loads(self._tell(False, False, True)).get("pg_status", {}).get(DEFAULT_GROUP)
        if status is None:
            return False
        begun, finished = int(status["last_enqueued_collective"]), max(0, int(status["last_completed_collective"]))
        waits = begun > finished == self.finished and self.begun > finished
        if not waits:
            self.oldest = None
        elif self.oldest is None:
            self.oldest = _entry(pickle.loads(self._tell(True, True, True)), finished + 1)
        self.begun, self.finished = begun, finished
        return begun > 0


def _entry(trace: dict[str, Any], number: int) -> tuple[int, str, int] | None:
    """What the default group's collective `number` is."""
    for entry in trace.get("entries", ()):
        if entry["pg_id"] == int(DEFAULT_GROUP) and entry["collective_seq_id"] == number and not entry["is_p2p"]:
            operation = entry["profiling_name"].rpartition(":")[2]
            shapes = ", ".join(str(tuple(sizes)) for sizes in entry["input_sizes"])
            since = time.monotonic_ns() - (time.time_ns() - entry["time_created_ns"])
            same_on_all = (operation, shapes) if operation in ("all_reduce", "allreduce") else operation
            digest = hash(json.dumps(same_on_all))
            return digest, f"{' '.join([operation, shapes]).strip()} at {_line(entry.get('frames', ()))}", since
    return None


def _line(frames: Any) -> str:
    """The innermost line that is neither a library's nor duoka's; `?` where there is none."""
    for frame in frames:
        file = frame["filename"]
        if "site-packages" not in file and "torch/" not in file and not file.startswith((OURS, "<", "??")):
            return f"{PurePath(file).name}:{frame['line']}"
    return "?"
