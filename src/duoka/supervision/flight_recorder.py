"""Status of scripts that call torch.distributed themselves, from torch's flight recorder.

duoka does not intercept their calls. A thread reads the counts of the default group twice a second; if they did not
change between two reads, it also reads the last entries, to find out where ranks called different collectives some
time ago. Other groups of the script are not followed.
"""

from __future__ import annotations

import _thread  # scripts do not see such a thread, and the interpreter does not join it
import math
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from duoka.supervision.status_board import RING, Collective, StatusSlot
from duoka.system.user_code import is_users

PERIOD = 0.5  # seconds between two reads
DEFAULT_GROUP = "0"
SAME_ON_ALL = ("all_reduce", "allreduce", "broadcast")  # dtypes and sizes must be equal; shapes may differ


class RecorderFollower:
    """Writes the counts to `slot` at each call of `look`.

    Creating the default group, in which ranks also wait for each other, is collective 1; the group's own follow.
    """

    def __init__(self, slot: StatusSlot, readers: Sequence[RecorderReader], is_made: Callable[[], bool]) -> None:
        self._slot, self._readers, self._is_made = slot, readers, is_made
        self._coming: Collective | None = None
        self._seen_coming = self._made = False

    def begin_group(self, line: str) -> None:
        """Record that this rank begins to create the default group, at this line of the script."""
        text = f"init_process_group at {line}"
        self._coming = self._coming or Collective(1, 1, text, time.monotonic_ns())

    def look(self) -> None:
        """Write the current counts. A collective that was unfinished at the last call, too, counts as a wait."""
        self._made = self._made or self._is_made()  # a script may destroy the default group later
        if not self._made:
            if self._coming is not None:
                self._slot.mirror(1, 0, [self._coming] if self._seen_coming else [])
                self._seen_coming = True
            return
        for reader in self._readers:
            if reader.read():
                # 1 more: the creation of the group was collective 1.
                later = [collective._replace(number=collective.number + 1) for collective in reader.recent]
                self._slot.mirror(reader.begun + 1, reader.finished + 1, later)
                return
        self._slot.mirror(1, 1)


def follow_recorder(slot: StatusSlot) -> RecorderFollower:
    """Start a thread that writes the counts to `slot`."""
    import torch

    from duoka.private.torch import flight_recorders

    readers = [RecorderReader(tell) for tell in flight_recorders()]
    follower = RecorderFollower(slot, readers, torch.distributed.is_initialized)

    def follow() -> None:
        while True:
            time.sleep(PERIOD)
            follower.look()

    _thread.start_new_thread(follow, ())
    return follower


class RecorderReader:
    """One flight recorder, and the last values read."""

    def __init__(self, tell: Callable[..., bytes]) -> None:
        self._tell = tell
        self._counts = (0, 0)
        self.begun = self.finished = 0  # numbers of collectives
        self.recent: list[Collective] = []  # as for `StatusSlot.mirror`

    def read(self) -> bool:
        """Read the recorder; return whether there is something to show."""
        # Safe to unpickle: it comes from this process.
        status = pickle.loads(self._tell(False, False, True)).get("pg_status", {}).get(DEFAULT_GROUP)
        if status is None:
            return False
        counts = int(status["last_enqueued_collective"]), max(0, int(status["last_completed_collective"]))
        if counts != self._counts:
            self._counts, self.recent = counts, []
            self.begun, self.finished = counts
        elif not self.recent:  # the rank may be waiting; only then are its entries read, which holds the GIL for long
            all_groups = pickle.loads(self._tell(True, True, True)).get("entries", ())
            group = [entry for entry in all_groups if entry["pg_id"] == int(DEFAULT_GROUP)]
            entries = [entry for entry in group if not entry["is_p2p"]]
            unfinished = [entry["collective_seq_id"] for entry in entries if not entry["retired"]]
            self.finished = min(unfinished, default=self.begun + 1) - 1  # the last one before these
            near = (entry for entry in entries if abs(entry["collective_seq_id"] - self.finished) < RING // 2)
            self.recent = [_collective(entry) for entry in near]
        return self.begun > 0


def _collective(entry: dict[str, Any]) -> Collective:
    operation = entry["profiling_name"].rpartition(":")[2]
    shapes = ", ".join(str(tuple(sizes)) for sizes in entry["input_sizes"])
    since = time.monotonic_ns() - (time.time_ns() - entry["time_created_ns"])  # the recorder has another clock
    what = [operation]
    if operation in SAME_ON_ALL:  # ranks may gather or scatter different sizes
        what += [*entry["input_dtypes"], *(str(math.prod(size)) for size in entry["input_sizes"])]
    words = [operation, shapes, *map(str.lower, entry["input_dtypes"])]
    text = f"{' '.join(filter(None, words))} at {_line(entry.get('frames', ()))}"
    return Collective(entry["collective_seq_id"], hash(tuple(what)), text, since)


def _line(frames: Any) -> str:
    """Return the innermost line that is neither a library's nor duoka's; `?` if there is none."""
    for frame in frames:
        file = frame["filename"]
        if is_users(file) and "torch/" not in file and not file.startswith("??"):  # "torch/csrc/…", of C++
            return f"{PurePath(file).name}:{frame['line']}"
    return "?"
