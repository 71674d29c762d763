"""Where each rank is: a page of shared memory that outlives any one worker.

The command process makes the board before it forks. Each worker writes its own seat: when it comes to a
collective, when it has left it, and after each step. Anybody may read. Nothing is locked: a seat has one writer,
an entry is written before the number that announces it, and a reader looks at that number again afterwards.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from duoka.errors import RanksApart

RING = 64  # collectives that each rank's seat remembers
ENTRY = 256  # bytes of one of them: four 64-bit numbers, then the text
TEXT = ENTRY - 4 * 8
HEAD = 64  # bytes in front of the entries: collectives begun and finished, steps, checkpoints, time waited
SEAT = HEAD + RING * ENTRY

# Places of the 64-bit numbers in a seat and in an entry.
BEGUN, FINISHED, STEPS, STEPPED, SLOWEST, SEEN, SAVED, WAITED = range(8)
DIGEST, SINCE, LENGTH, NUMBER = 0, 1, 2, 3

AT_END = "the end of the script"  # in place of a line, in the text of a collective there


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one rank has come. Several collectives may be on their way at a time; they end in their order.

    begun, finished: how many collectives.
    number: the one that it is in: the first that is not finished; where all are, the last.
    text, since: what that one is, and CLOCK_MONOTONIC when it was begun, in seconds.
    seen: CLOCK_MONOTONIC of when this was so: now, but for a seat that is written by looking now and then.
    steps, slowest: how many steps are done, and the seconds of the slowest; the first, which is as long as the
        start, does not count.
    """

    begun: int
    finished: int
    number: int
    text: str
    since: float
    seen: float
    steps: int
    slowest: float

    @property
    def waiting(self) -> bool:
        """Whether a collective is not finished."""
        return self.begun > self.finished


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the ranks came to different collectives.

    number: of the collective. sides: the ranks of each side and what they came to; the smallest side first.
    """

    number: int
    sides: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def at_end(self) -> tuple[int, ...]:
        """The ranks whose script had ended there."""
        return next((ranks for ranks, text in self.sides if text.endswith(AT_END)), ())

    def __str__(self) -> str:
        sides = (f"{name_ranks(list(ranks))} came to {text}" for ranks, text in self.sides)
        return f"the ranks came to different collectives (number {self.number:,}): " + ", ".join(sides)


class Collective(NamedTuple):
    """One collective of a rank, as torch's flight recorder tells it.

    digest: equal on ranks that agree. since: CLOCK_MONOTONIC in nanoseconds.
    """

    number: int
    digest: int
    text: str
    since: int


class Board:
    """The seats of a machine's ranks, in anonymous memory shared with every process forked from here on."""

    def __init__(self, memory: mmap.mmap, ranks: range) -> None:
        self.ranks = ranks
        view = memoryview(memory)
        self._bytes = {rank: view[at * SEAT : (at + 1) * SEAT] for at, rank in enumerate(ranks)}
        self._words = {rank: seat.cast("Q") for rank, seat in self._bytes.items()}

    @classmethod
    def create(cls, count: int, first: int = 0) -> Board:
        """An empty board for `count` ranks, from `first` on."""
        return cls(mmap.mmap(-1, count * SEAT), range(first, first + count))

    def seat(self, rank: int) -> Seat:
        """What the worker of `rank` writes."""
        return Seat(self, rank)

    def read(self, rank: int) -> Progress:
        """How far `rank` has come; the text is empty before its first collective."""
        words = self._words[rank]
        while True:
            begun, finished = words[BEGUN], words[FINISHED]
            seen = (words[SEEN] or time.monotonic_ns()) / 1e9
            steps, slowest = words[STEPS], words[SLOWEST] / 1e9
            if begun == 0:
                return Progress(0, 0, 0, "", 0.0, seen, steps, slowest)
            number = min(begun, max(finished + 1, begun - RING // 2))  # never one that is about to be forgotten
            since = words[_entry(number) + SINCE] / 1e9
            text = self.text(rank, number)
            if words[BEGUN] < number + RING:  # otherwise it may have been written over meanwhile
                return Progress(begun, min(finished, begun), number, text, since, seen, steps, slowest)

    def saved(self) -> int | None:
        """The step of the newest checkpoint that any rank has written or restored; None where there is none."""
        newest = max(words[SAVED] for words in self._words.values())
        return newest - 1 if newest else None

    def text(self, rank: int, count: int) -> str:
        """What `rank` called its collective number `count`, one of its last `RING`."""
        entry = _entry(count)
        length = min(self._words[rank][entry + LENGTH], TEXT)
        start = (entry + 4) * 8
        return bytes(self._bytes[rank][start : start + length]).decode(errors="replace")

    def remembers(self, rank: int, count: int) -> bool:
        """Whether `rank` has a seat here, came to collective `count`, and not so long ago that it is forgotten."""
        if rank not in self._words:
            return False
        words = self._words[rank]
        return 0 < count <= words[BEGUN] < count + RING and words[_entry(count) + NUMBER] == count

    def parting(self) -> Parting | None:
        """The first collective, among those remembered, on which the ranks disagree; None where there is none."""
        last = max(words[BEGUN] for words in self._words.values())
        found = (self.apart(count) for count in range(max(1, last - RING // 2 + 1), last + 1))
        return next((one for one in found if one is not None), None)

    def apart(self, count: int) -> Parting | None:
        """How the ranks that came to collective `count` disagree on what it is; None where they do not."""
        came = [rank for rank in self.ranks if self.remembers(rank, count)]
        entry = _entry(count) + DIGEST
        by_digest: dict[int, list[int]] = {}
        for rank in came:
            by_digest.setdefault(self._words[rank][entry], []).append(rank)
        if len(by_digest) < 2:
            return None
        sides = sorted(by_digest.values(), key=len)
        return Parting(count, tuple((tuple(ranks), self.text(ranks[0], count)) for ranks in sides))


class Seat:
    """What one rank tells of itself. One writer: the worker that sits here."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank = board, rank
        self._words, self._bytes = board._words[rank], board._bytes[rank]
        self._others = [board._words[other] for other in board.ranks if other != rank]
        self._begun, self._finished = self._words[BEGUN], self._words[FINISHED]

    def enter(self, digest: int, text: str) -> None:
        """This rank comes to its next collective.

        digest: 63 bits that say what it is (operation, shape, dtype, line), equal on ranks that agree.
        text: the same in words, such as "all_reduce (3,) float32 at train.py:41"; what is too long is cut.
        """
        begun = self._begun = self._begun + 1
        entry = 8 + (begun & 63) * 32  # _entry(begun), written out: this runs once for each collective
        words, said = self._words, text.encode()[:TEXT]
        start = entry * 8 + 32
        self._bytes[start : start + len(said)] = said
        words[entry] = digest & 0x7FFF_FFFF_FFFF_FFFF
        words[entry + 1] = time.monotonic_ns()
        words[entry + 2] = len(said)
        words[entry + 3] = begun
        words[BEGUN] = begun

    def leave(self, waited: int = 0) -> None:
        """The first of this rank's unfinished collectives is finished, so the others have come to as many.

        waited: nanoseconds for which this rank had nothing else to do.

        Raises:
            RanksApart: another rank's collective of the same number was not the same one.
        """
        finished = self._finished = self._finished + 1
        self._words[FINISHED] = finished
        self._words[WAITED] += waited
        entry = 8 + (finished & 63) * 32
        digest = self._words[entry]
        for words in self._others:
            if words[entry] != digest and finished <= words[BEGUN] < finished + RING:
                self._check(finished)

    def step(self, steps: int) -> None:
        """This rank has done its step number `steps`."""
        words, now = self._words, time.monotonic_ns()
        if steps > 1 and now - words[STEPPED] > words[SLOWEST]:
            words[SLOWEST] = now - words[STEPPED]
        words[STEPPED] = now
        words[STEPS] = steps

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self._words[STEPS]

    @property
    def waited(self) -> float:
        """Seconds for which this rank has waited in collectives so far."""
        return self._words[WAITED] / 1e9

    def saved(self, step: int) -> None:
        """A checkpoint of this step is on the disk."""
        self._words[SAVED] = step + 1

    def mirror(self, begun: int, finished: int, recent: Sequence[Collective] = ()) -> None:
        """Show the collectives of a script that calls torch itself, which torch's flight recorder counts.

        recent: the last ones, where the rank waits; without the first unfinished one among them, it is not said to.
        """
        if all(one.number != finished + 1 for one in recent):
            begun_shown = finished_shown = begun
        else:
            finished_shown, begun_shown = finished, min(begun, finished + RING // 2)
        for one in recent:
            if begun_shown - RING < one.number <= begun_shown:
                self._mirror_one(one)
        self._words[FINISHED] = finished_shown
        self._words[BEGUN] = begun_shown
        self._words[SEEN] = time.monotonic_ns()

    def _mirror_one(self, one: Collective) -> None:
        entry, said = _entry(one.number), one.text.encode()[:TEXT]
        self._bytes[(entry + 4) * 8 : (entry + 4) * 8 + len(said)] = said
        values = one.digest & 0x7FFF_FFFF_FFFF_FFFF, one.since, len(said), one.number
        for place, value in enumerate(values):
            self._words[entry + place] = value

    def _check(self, count: int) -> None:
        difference = self._board.apart(count)  # reads again: the entry may have been written over meanwhile
        if difference is not None:
            raise RanksApart(str(difference))


def name_ranks(ranks: list[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0, 1 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _entry(count: int) -> int:
    """Where the entry of collective `count` begins, in words."""
    return (HEAD + (count % RING) * ENTRY) // 8
