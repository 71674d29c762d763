"""The collectives of a script that calls torch.distributed itself, as torch's flight recorder tells them.

Such a script is left alone, so its calls are not seen one by one. A thread looks twice a second at the counts of
the default group, and at the recorder's entries only where the rank stands still between two looks: at those of the
last ones, so that ranks whose ways parted some collectives ago are told where. A group that the script makes besides
is not followed.
"""

from __future__ import annotations

import _thread  # a thread of the threading module could be seen by the script, and would be waited for
import math
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from duoka.board import RING, Collective
from duoka.traces import OURS

PERIOD = 0.5  # seconds between two looks
DEFAULT_GROUP = "0"
SAME_ON_ALL = ("all_reduce", "allreduce", "broadcast")  # in types and numbers of elements: shapes may differ by right


class Seat(Protocol):
    """Where the counts are shown (`duoka.board.Seat`)."""

    def mirror(self, begun: int, finished: int, recent: Sequence[Collective] = ()) -> None:
        """Show counts, and what the last collectives are."""


class Follower:
    """Shows on `seat` how far this process has come, as often as it is called.

    The making of the default group, in which ranks wait for each other too, is collective 1; the group's own follow.

    is_made: whether the default group is there. It may be left later.
    """

    def __init__(self, seat: Seat, looks: Sequence[Look], is_made: Callable[[], bool]) -> None:
        self._seat, self._looks, self._is_made = seat, looks, is_made
        self._coming: Collective | None = None
        self._seen_coming = self._made = False

    def comes(self, line: str) -> None:
        """This rank comes to make the default group, at this line of the script."""
        text = f"init_process_group at {line}"
        self._coming = self._coming or Collective(1, 1, text, time.monotonic_ns())

    def look(self) -> None:
        """Show how far it has come. What it was in at the last look too, it waits in."""
        self._made = self._made or self._is_made()
        if not self._made:
            if self._coming is not None:
                self._seat.mirror(1, 0, [self._coming] if self._seen_coming else [])
                self._seen_coming = True
            return
        for look in self._looks:
            if look.again():
                later = [one._replace(number=one.number + 1) for one in look.recent]
                self._seat.mirror(look.begun + 1, look.finished + 1, later)
                return
        self._seat.mirror(1, 1)


def show_on(seat: Seat) -> Follower:
    """Go on to show on `seat` how far this process has come, from a thread of its own."""
    import torch

    from duoka.private.torch import flight_recorders

    looks = [Look(tell) for tell in flight_recorders()]
    follower = Follower(seat, looks, torch.distributed.is_initialized)
    _thread.start_new_thread(_follow, (follower,))
    return follower


def _follow(follower: Follower) -> None:
    while True:
        time.sleep(PERIOD)
        follower.look()


class Look:
    """One recorder, looked at again and again.

    begun, finished: how many collectives. recent: what `Seat.mirror` takes.
    """

    def __init__(self, tell: Callable[..., bytes]) -> None:
        self._tell = tell
        self._counts = (0, 0)
        self.begun = self.finished = 0
        self.recent: list[Collective] = []

    def again(self) -> bool:
        """Whether there is something to be shown."""
        # Its own process's memory: no bytes from elsewhere are unpickled.
        status = pickle.loads(self._tell(False, False, True)).get("pg_status", {}).get(DEFAULT_GROUP)
        if status is None:
            return False
        counts = int(status["last_enqueued_collective"]), max(0, int(status["last_completed_collective"]))
        if counts != self._counts:
            self._counts, self.recent = counts, []
            self.begun, self.finished = counts
        elif not self.recent:
            entries = _of_default_group(pickle.loads(self._tell(True, True, True)))
            self.finished = _finished(entries, self.begun)
            near = (one for one in entries if abs(one["collective_seq_id"] - self.finished) < RING // 2)
            self.recent = [_collective(one) for one in near]
        return self.begun > 0


def _of_default_group(trace: dict[str, Any]) -> list[dict[str, Any]]:
    group = int(DEFAULT_GROUP)
    return [entry for entry in trace.get("entries", ()) if entry["pg_id"] == group and not entry["is_p2p"]]


def _finished(entries: Sequence[dict[str, Any]], begun: int) -> int:
    """How many are finished up to the first that is not: the count is the last one's that was, in whatever order."""
    return min([entry["collective_seq_id"] for entry in entries if not entry["retired"]], default=begun + 1) - 1


def _collective(entry: dict[str, Any]) -> Collective:
    operation = entry["profiling_name"].rpartition(":")[2]
    shapes = ", ".join(str(tuple(sizes)) for sizes in entry["input_sizes"])
    since = time.monotonic_ns() - (time.time_ns() - entry["time_created_ns"])
    what = [operation]
    if operation in SAME_ON_ALL:
        what += [*entry["input_dtypes"], *(str(math.prod(size)) for size in entry["input_sizes"])]
    words = [operation, shapes, *map(str.lower, entry["input_dtypes"])]
    text = f"{' '.join(filter(None, words))} at {_line(entry.get('frames', ()))}"
    return Collective(entry["collective_seq_id"], hash(tuple(what)), text, since)


def _line(frames: Any) -> str:
    """The innermost line that is neither a library's nor duoka's; `?` where there is none."""
    for frame in frames:
        file = frame["filename"]
        if "site-packages" not in file and "torch/" not in file and not file.startswith((OURS, "<", "??")):
            return f"{PurePath(file).name}:{frame['line']}"
    return "?"
