"""A status board in shared memory: each rank writes its progress, and the command process reads it.

The command process creates the board before it forks the workers. Each worker writes its own slot when it begins and
ends a collective, and after each step. There are no locks: a slot has one writer, which writes an entry before the
number that announces it, and readers check that number again afterwards.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic_ns  # a script's `time.monotonic_ns` may be rank 0's
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from duoka.errors import RanksApart
from duoka.supervision.rings import OUTPUT_SIZE, RemoteSamples, ScriptOutput, samples_size
from duoka.system.messages import listed

if TYPE_CHECKING:
    from duoka.supervision.interruption import Interruption

T = TypeVar("T")

RING = 64  # collectives that a slot remembers
ENTRY = 256  # bytes of one of them: four 64-bit numbers, then the text
TEXT = ENTRY - 4 * 8
HEAD = 128  # bytes in front of the entries: 16 numbers
SLOT_SIZE = HEAD + RING * ENTRY

# Indices of the 64-bit numbers in a slot and in an entry.
BEGUN, FINISHED, STEPS, STEPPED, SLOWEST, SEEN, SAVED, WAITED, LOADED, SAMPLES = range(10)
BATCH, TRAINED = 10, 11  # the number of a batch in the upper half, how many there are in the lower
MEETING, WAITS = 12, 13  # the last meeting (StatusSlot.meet); 1 while the rank waits outside of a collective
ROWS, OF_ROW = 14, 15  # of the largest batch; nanoseconds of each, 0 if they are not measured
HALF = 32
EPOCH, MOST = 40, 0xFF  # shift of the number of collectives before a meeting; the most meetings until the next one
DIGEST, SINCE, LENGTH, NUMBER = 0, 1, 2, 3

AT_END = "the end of the script"  # in place of a line, in the name of a collective there


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one rank. Several collectives may be unfinished at a time; they end in order."""

    begun: int  # numbers of collectives
    finished: int
    number: int  # the collective that it is in: the first unfinished one; if there is none, the last
    text: str  # name of that one
    since: float  # CLOCK_MONOTONIC at its begin, in seconds
    seen: float  # CLOCK_MONOTONIC at which this was true: now, except for slots that are updated by polling
    steps: int  # finished ones
    slowest: float  # seconds of the slowest of them, without the first, which includes the start

    @property
    def waiting(self) -> bool:
        return self.begun > self.finished


class Counters(NamedTuple):
    """Sums of one rank since its start; the last two are none."""

    steps: int  # finished ones
    waited: float  # seconds in collectives
    loaded: float  # seconds in which it took batches from torch's loaders
    samples: int  # of these batches, where their loader has a batch size
    rows: int  # its share of the largest batch
    seconds_of_row: float  # without waits; 0 if they are not measured


class Batches(NamedTuple):
    """The place in loaders."""

    batch: int  # the last one taken, counted from 1
    batches: int  # how many there are; 0: not known
    trained: int  # the one after which the last step was made
    trained_of: int


@dataclass(frozen=True, slots=True)
class CollectiveMismatch:
    """Ranks called different collectives."""

    number: int
    # The ranks of each side and the collective that they called; the smallest side first.
    sides: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def at_end(self) -> tuple[int, ...]:
        """Ranks whose script had ended there."""
        return next((ranks for ranks, text in self.sides if text.endswith(AT_END)), ())

    def __str__(self) -> str:
        sides = (f"{name_ranks(ranks)} called {text}" for ranks, text in self.sides)
        return f"the ranks called different collectives (number {self.number:,}): " + ", ".join(sides)


class Collective(NamedTuple):
    """One collective of a rank, from torch's flight recorder."""

    number: int
    digest: int  # equal on ranks that agree
    text: str
    since: int  # CLOCK_MONOTONIC in nanoseconds


class StatusBoard:
    """The slots of a machine's ranks, in memory shared with processes forked later.

    others: numbers of workers of machines 1, 2, ..., whose samples machine 0's board has too.
    """

    def __init__(self, memory: mmap.mmap, ranks: range, others: Sequence[int] = ()) -> None:
        self.ranks, self._others = ranks, others
        view = memoryview(memory)
        self._bytes = {rank: view[at * SLOT_SIZE : (at + 1) * SLOT_SIZE] for at, rank in enumerate(ranks)}
        self._words = {rank: slot.cast("Q") for rank, slot in self._bytes.items()}
        ctrl_c = len(ranks) * SLOT_SIZE
        self._rest = view[ctrl_c + 8 * (1 + len(ranks)) :]
        # 1 after a Ctrl-C; then, for each rank, the collective before which it has stopped.
        self._ctrl_c = view[ctrl_c : ctrl_c + 8 * (1 + len(ranks))].cast("Q")
        self.interruption: Interruption | None = None  # of this process's rank

    @classmethod
    def create(cls, count: int, first: int = 0, file: int = -1, others: Sequence[int] = ()) -> StatusBoard:
        """Create an empty board for `count` ranks, numbered from `first`.

        file: descriptor of an empty file that holds it, for other processes to open; -1: memory without a file.
        """
        size = _size(count, others)
        if file != -1:
            os.ftruncate(file, size)
        return cls(mmap.mmap(file, size), range(first, first + count), others)

    @classmethod
    def open(cls, file: int, ranks: range, others: Sequence[int] = ()) -> StatusBoard:
        """Map the board of another process, only to read it.

        Raises ValueError if the file is too short for these ranks.
        """
        return cls(mmap.mmap(file, _size(len(ranks), others), access=mmap.ACCESS_READ), ranks, others)

    @cached_property
    def script_output(self) -> ScriptOutput:
        """Output of rank 0's script; only on a board from `create` or `open`."""
        return ScriptOutput(self._rest[:OUTPUT_SIZE])

    @cached_property
    def remote_samples(self) -> RemoteSamples:
        """Samples of other machines' ranks; only on a board from `create` or `open`."""
        return RemoteSamples(self._rest[OUTPUT_SIZE:], self._others)

    def slot(self, rank: int) -> StatusSlot:
        return StatusSlot(self, rank)

    def interrupt(self) -> None:
        """Announce a Ctrl-C to all ranks."""
        self._ctrl_c[0] = 1

    @property
    def is_interrupted(self) -> bool:
        return bool(self._ctrl_c[0])

    def stop_before(self, rank: int, number: int) -> bool:
        """Record that `rank` has stopped before collective `number`; return whether all ranks have."""
        self._ctrl_c[1 + rank - self.ranks.start] = number
        return all(stopped == number for stopped in self._ctrl_c[1:])

    def has_begun(self, number: int) -> bool:
        """Return whether any rank has begun collective `number`."""
        return any(words[BEGUN] >= number for words in self._words.values())

    def read(self, rank: int) -> RankProgress:
        """Return the progress of `rank`; the text is empty before its first collective."""
        words = self._words[rank]
        while True:  # until the entry that was read was not overwritten meanwhile
            begun, finished = words[BEGUN] + words[WAITS], words[FINISHED]
            seen = (words[SEEN] or monotonic_ns()) / 1e9
            steps, slowest = words[STEPS], words[SLOWEST] / 1e9
            if begun == 0:
                return RankProgress(0, 0, 0, "", 0.0, seen, steps, slowest)
            number = min(begun, max(finished + 1, begun - RING // 2))  # one that is not about to be overwritten
            since = words[_entry(number) + SINCE] / 1e9
            text = self.text(rank, number)
            if words[BEGUN] < number + RING:
                return RankProgress(begun, min(finished, begun), number, text, since, seen, steps, slowest)

    def counters(self, rank: int) -> Counters:
        words = self._words[rank]
        times = words[WAITED] / 1e9, words[LOADED] / 1e9
        return Counters(words[STEPS], *times, words[SAMPLES], words[ROWS], words[OF_ROW] / 1e9)

    def batches(self, rank: int) -> Batches:
        both = self._words[rank][BATCH : TRAINED + 1]
        return Batches(*(half for word in both for half in divmod(word, 1 << HALF)))

    def saved(self) -> int | None:
        """Return the step of the newest checkpoint that a rank has written or restored; None without one."""
        newest = max(words[SAVED] for words in self._words.values())
        return newest - 1 if newest else None

    def text(self, rank: int, count: int) -> str:
        """Return the name of collective `count` of `rank`, one of its last `RING`."""
        entry = _entry(count)
        length = min(self._words[rank][entry + LENGTH], TEXT)
        start = (entry + 4) * 8
        return bytes(self._bytes[rank][start : start + length]).decode(errors="replace")

    def remembers(self, rank: int, count: int) -> bool:
        """Return whether the board has collective `count` of `rank`."""
        if rank not in self._words:
            return False
        words = self._words[rank]
        return 0 < count <= words[BEGUN] < count + RING and words[_entry(count) + NUMBER] == count

    def first_mismatch(self) -> CollectiveMismatch | None:
        """Return the first remembered collective in which ranks differ; None if there is none."""
        last = max(words[BEGUN] for words in self._words.values())
        # Only in the newer half of the rings: the older may be overwritten while it is read.
        mismatches = (self.mismatch_at(count) for count in range(max(1, last - RING // 2 + 1), last + 1))
        return next(filter(None, mismatches), None)

    def mismatch_at(self, count: int) -> CollectiveMismatch | None:
        """Return how the ranks that began collective `count` differ in it; None if they do not."""
        came = [rank for rank in self.ranks if self.remembers(rank, count)]
        sides = sorted(ranks_by((rank, self._words[rank][_entry(count) + DIGEST]) for rank in came).values(), key=len)
        if len(sides) < 2:
            return None
        return CollectiveMismatch(count, tuple((tuple(ranks), self.text(ranks[0], count)) for ranks in sides))


class StatusSlot:
    """The status of one rank, written by its worker.

    Where ranks share no memory, each has a board of its own (`StatusBoard.create(1, rank)`), which nobody reads.
    """

    def __init__(self, board: StatusBoard, rank: int) -> None:
        self._board, self.rank = board, rank
        self._words, self._bytes = board._words[rank], board._bytes[rank]
        self._others = [board._words[other] for other in board.ranks if other != rank]
        self._begun, self._finished = self._words[BEGUN], self._words[FINISHED]
        self._passed = 0  # of those finished: by the stream of an accelerator

    def begin_collective(self, digest: int, text: str) -> None:
        """Record that this rank begins its next collective.

        digest: 63 bits of its operation, shape, dtype and line, equal on ranks that agree.
        text: the same in words, such as "all_reduce (3,) float32 at train.py:41"; long texts are cut.
        """
        begun = self._begun = self._begun + 1
        entry = 16 + (begun & 63) * 32  # _entry(begun), inlined: this runs for each collective
        words, said = self._words, text.encode()[:TEXT]
        start = entry * 8 + 32
        self._bytes[start : start + len(said)] = said
        words[entry] = digest & 0x7FFF_FFFF_FFFF_FFFF
        words[entry + 1] = monotonic_ns()
        words[entry + 2] = len(said)
        words[entry + 3] = begun
        words[BEGUN] = begun  # last: from now on readers take the entry for complete

    def end_collective(self, waited: int = 0) -> None:
        """Record that the first unfinished collective is finished, so that the other ranks have begun as many.

        waited: nanoseconds that this rank spent waiting. Raises RanksApart if another rank called another collective
        at that number.
        """
        self._finished += 1
        finished = self._words[FINISHED] = self._finished + self._passed
        self._words[WAITED] += waited
        self._compare(finished)

    def pass_collectives(self, count: int) -> None:
        """Record that the stream of an accelerator has passed so many more collectives. Another thread may call it.

        It writes the sum anew, in case that `end_collective` has read the count before.
        """
        self._passed += count
        self._words[FINISHED] = self._finished + self._passed

    def check_begun(self) -> None:
        """Compare the collective that this rank has begun with those of ranks that have begun it before.

        For collectives in which ranks that do not call the same would wait for each other, or be aborted. Raises
        RanksApart if another rank called another collective at that number.
        """
        self._compare(self._begun)

    def _compare(self, number: int) -> None:
        entry = 16 + (number & 63) * 32
        digest = self._words[entry]
        for words in self._others:
            # A rank that has not begun it has an older entry there; one that is far ahead has overwritten it.
            if words[entry] != digest and number <= words[BEGUN] < number + RING:
                difference = self._board.mismatch_at(number)  # reads again: the entry may be overwritten by now
                if difference is not None:
                    raise RanksApart(str(difference))

    def check_interruption(self) -> None:
        """Stop before this rank's next collective after a Ctrl-C. Raises KeyboardInterrupt when all ranks have."""
        if self._board.interruption is not None:
            self._board.interruption.check(self._begun + 1)

    @property
    def begun(self) -> int:
        return self._begun

    def has_passed(self, rank: int, begun: int) -> bool:
        """Return whether `rank` has begun more than `begun` collectives."""
        return self._board._words[rank][BEGUN] > begun

    def meet(self, digest: int) -> Callable[[int], bool | None]:
        """Announce that this rank is at an operation which the others may make, too, or not.

        The others make it, too, if they have begun as many collectives, and if all such operations since then were
        the same. digest: 32 bits of the operation.

        Returns a function of another rank: whether it is at this operation; None: it is not known yet. True stays
        true until this rank begins another collective.
        """
        begun, words = self._begun, self._words
        epoch = (begun & 0xFF_FFFF) << EPOCH
        last = words[MEETING]
        number = (last >> 32 & MOST) + 1 if last >> EPOCH == epoch >> EPOCH else 1
        if number >= MOST:
            self.leave()  # what it writes is greater than all meetings of this epoch: nobody waits for this rank
            return lambda rank: False
        # One word, so that others read all of it as it was at one moment.
        word = words[MEETING] = epoch | number << 32 | digest

        def is_here(rank: int) -> bool | None:
            passed = self.has_passed(rank, begun)  # read first, as the other announces its meeting first
            there = self._board._words[rank][MEETING]
            if there >> 32 == word >> 32:
                return there == word
            return False if passed or (there >> EPOCH == word >> EPOCH and there > word) else None

        return is_here

    def leave(self) -> None:
        """Announce that this rank will meet no others before its next collective."""
        self._words[MEETING] = (self._begun & 0xFF_FFFF) << EPOCH | (1 << EPOCH) - 1

    def begin_wait(self, text: str) -> None:
        """Show that this rank waits for others, outside of a collective. text: in what."""
        self._write_entry(self._begun + 1, 0, text, monotonic_ns())  # which the next collective overwrites
        self._words[WAITS] = 1

    def end_wait(self) -> None:
        self._words[WAITS] = 0

    def step(self, steps: int) -> None:
        """Record that step number `steps` is done."""
        words, now = self._words, monotonic_ns()
        if steps > 1 and now - words[STEPPED] > words[SLOWEST]:
            words[SLOWEST] = now - words[STEPPED]
        words[STEPPED] = now
        words[STEPS] = steps
        words[TRAINED] = words[BATCH]

    def load(self, nanoseconds: int, samples: int, number: int, of: int) -> None:
        """Record that this rank has taken a batch of so many samples from a loader, in so much time.

        number: of the batch, counted from 1. of: the length of the loader; 0: unknown.
        """
        words = self._words
        words[LOADED] += nanoseconds
        words[SAMPLES] += samples
        words[BATCH] = (number << HALF) + of

    def show_rows(self, rows: int, seconds: float = 0.0) -> None:
        """Record this rank's share of the largest batch. seconds: of each row, without waits; 0: as before."""
        self._words[ROWS] = rows
        self._words[OF_ROW] = int(seconds * 1e9) or self._words[OF_ROW]

    def begin_epoch(self) -> None:
        """Record that no batch of this epoch has trained yet."""
        self._words[TRAINED] = 0

    @property
    def steps(self) -> int:
        return self._words[STEPS]

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited in collectives."""
        return self._words[WAITED] / 1e9

    def saved(self, step: int) -> None:
        """Record that a checkpoint of this step is on disk."""
        self._words[SAVED] = step + 1

    def mirror(self, begun: int, finished: int, recent: Sequence[Collective] = ()) -> None:
        """Record the counts of torch's flight recorder, for a script that calls torch.distributed itself.

        recent: the last collectives, if the rank waits; without the first unfinished one among them, no wait is
        recorded.
        """
        if all(collective.number != finished + 1 for collective in recent):
            begun_shown = finished_shown = begun
        else:
            finished_shown, begun_shown = finished, min(begun, finished + RING // 2)
        for number, digest, text, since in recent:
            if begun_shown - RING < number <= begun_shown:
                self._write_entry(number, digest, text, since)
        self._words[FINISHED] = finished_shown
        self._words[BEGUN] = begun_shown
        self._words[SEEN] = monotonic_ns()

    def _write_entry(self, number: int, digest: int, text: str, since: int) -> None:
        entry, name = _entry(number), text.encode()[:TEXT]
        self._bytes[(entry + 4) * 8 : (entry + 4) * 8 + len(name)] = name
        words = self._words
        # Python's hashes may be negative.
        words[entry], words[entry + 1], words[entry + 2] = digest & 0x7FFF_FFFF_FFFF_FFFF, since, len(name)
        words[entry + 3] = number


def ranks_by(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks that have each value, from pairs of a rank and its value."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 1`, `ranks 0 and 2`, `ranks 0, 1 and 3`."""
    return listed("rank", ranks)


def _size(count: int, others: Sequence[int]) -> int:
    return count * SLOT_SIZE + 8 * (1 + count) + OUTPUT_SIZE + samples_size(others)


def _entry(count: int) -> int:
    """Return the index of the first word of the entry of collective `count`."""
    return (HEAD + (count % RING) * ENTRY) // 8
