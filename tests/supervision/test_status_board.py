"""Meetings of ranks at operations that some of them may not make."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import is_possible
from duoka.errors import RanksApart
from duoka.supervision.status_board import AT_END, RING, TEXT, Collective, StatusBoard, name_ranks
from tests.view.processes import all_well, in_processes


def test_a_new_board_shows_nobody_anywhere() -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        progress = board.read(rank)
        assert (progress.begun, progress.finished, progress.text, progress.waiting) == (0, 0, "", False)


def test_the_newest_checkpoint() -> None:
    board = StatusBoard.create(3)
    assert board.saved() is None
    board.slot(0).saved(0)
    assert board.saved() == 0
    board.slot(0).saved(12)
    board.slot(1).step(3)
    assert board.saved() == 12


def test_a_rank_is_seen_inside_of_a_collective_and_after_it() -> None:
    board = StatusBoard.create(1)
    slot = board.slot(0)
    before = time.monotonic()
    slot.begin_collective(1, "all_reduce (3,) float32 at train.py:41")
    inside = board.read(0)
    assert (inside.begun, inside.finished, inside.number, inside.waiting) == (1, 0, 1, True)
    assert inside.text == "all_reduce (3,) float32 at train.py:41"
    assert before <= inside.since <= time.monotonic()
    slot.end_collective()
    after = board.read(0)
    assert (after.begun, after.finished, after.waiting, after.text) == (1, 1, False, inside.text)


def test_of_several_on_their_way_the_first_is_shown() -> None:
    board = StatusBoard.create(1)
    slot = board.slot(0)
    for number in range(1, 4):
        slot.begin_collective(number, f"number {number}")
    slot.end_collective()
    progress = board.read(0)
    assert (progress.begun, progress.finished, progress.number, progress.text) == (3, 1, 2, "number 2")


def test_more_on_their_way_than_are_remembered() -> None:
    board = StatusBoard.create(1)
    slot = board.slot(0)
    for number in range(1, 3 * RING):
        slot.begin_collective(number, f"number {number}")
    progress = board.read(0)
    assert progress.waiting
    assert progress.text == f"number {progress.number}"


def test_what_one_process_writes_another_reads() -> None:
    board = StatusBoard.create(2)
    pid = os.fork()
    if pid == 0:
        try:
            slot = board.slot(1)
            for _ in range(100):
                slot.begin_collective(5, "barrier")
                slot.end_collective()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert board.read(1).finished == 100
    assert board.read(0).begun == 0


def test_a_seat_goes_on_where_its_rank_was() -> None:
    board = StatusBoard.create(1)
    board.slot(0).begin_collective(1, "a")
    board.slot(0).end_collective()
    board.slot(0).begin_collective(2, "b")
    assert (board.read(0).begun, board.read(0).finished) == (2, 1)


@given(st.text(max_size=300))
def test_any_text_can_be_written_and_is_cut_where_it_is_too_long(text: str) -> None:
    board = StatusBoard.create(2)
    board.slot(1).begin_collective(1, "next to it")
    board.slot(0).begin_collective(1, text)
    read = board.read(0).text
    if len(text.encode()) <= TEXT:
        assert read == text
    else:
        assert read.rstrip("\ufffd").encode() == text.encode()[: len(read.rstrip("\ufffd").encode())]
        assert len(read) >= TEXT // 4
    assert board.read(1).text == "next to it"


@pytest.mark.parametrize("digest", [0, 2**63, -1, -(2**63), 2**70 + 1, hash(2**40 + 1)])
def test_any_hash_is_a_digest(digest: int) -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        board.slot(rank).begin_collective(digest, "a")
    board.slot(0)
    assert board.mismatch_at(1) is None


def test_ranks_that_came_to_different_collectives_are_told_both() -> None:
    board = StatusBoard.create(3)
    seats = [board.slot(rank) for rank in range(3)]
    for rank, slot in enumerate(seats):
        slot.begin_collective(1, "barrier")
        slot.end_collective()
        slot.begin_collective(2 + (rank == 1), "all_reduce at a.py:2" if rank == 1 else "broadcast at a.py:1")
    for slot in seats:
        with pytest.raises(RanksApart) as error:
            slot.end_collective()
        assert str(error.value) == (
            "the ranks called different collectives (number 2): "
            "rank 1 called all_reduce at a.py:2, ranks 0 and 2 called broadcast at a.py:1"
        )
    mismatch = board.first_mismatch()
    assert mismatch is not None
    assert (mismatch.number, mismatch.sides[0]) == (2, ((1,), "all_reduce at a.py:2"))
    assert mismatch.at_end == ()


def test_a_script_that_ended_while_others_went_on_is_told_from_one_that_went_astray() -> None:
    board = StatusBoard.create(2)
    board.slot(0).begin_collective(1, "all_reduce at a.py:1")
    board.slot(1).begin_collective(2, f"all_reduce at {AT_END}")
    mismatch = board.first_mismatch()
    assert mismatch is not None
    assert mismatch.at_end == (1,)


def test_the_ranks_agree_on_whatever_is_still_remembered() -> None:
    board = StatusBoard.create(2)
    seats = [board.slot(rank) for rank in range(2)]
    for number in range(1, 3 * RING):
        for slot in seats:
            slot.begin_collective(number, "the same")
            slot.end_collective()
        assert board.first_mismatch() is None


def test_steps_and_the_slowest_but_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now = StatusBoard.create(1), 10**9
    monkeypatch.setattr("duoka.supervision.status_board.monotonic_ns", lambda: now)
    for number, seconds in enumerate((100, 2, 5, 3), 1):
        now += seconds * 10**9
        board.slot(0).step(number)
    progress = board.read(0)
    assert (progress.steps, progress.slowest) == (4, 5.0)


def test_what_is_looked_at_now_and_then_waits_only_if_it_is_known_since_when() -> None:
    board = StatusBoard.create(1)
    slot = board.slot(0)
    slot.mirror(7, 5)
    assert not board.read(0).waiting
    slot.mirror(7, 5, [Collective(6, 1, "barrier at a.py:1", 3 * 10**9)])
    progress = board.read(0)
    assert (progress.waiting, progress.number, progress.text, progress.since) == (True, 6, "barrier at a.py:1", 3.0)
    assert progress.seen <= time.monotonic()
    slot.mirror(500, 5, [Collective(6, 1, "barrier at a.py:1", 3 * 10**9)])
    assert board.read(0).number == 6
    slot.mirror(8, 8)
    assert not board.read(0).waiting


def test_where_ways_parted_some_collectives_ago_is_told() -> None:
    """Rank 0 sent, waited for nobody, and is one further than the others, who wait for it."""
    board = StatusBoard.create(3)
    seen = [Collective(number, 1, f"all_reduce at a.py:{number}", 10**9) for number in range(3, 9)]
    astray = [*seen[:3], Collective(6, 2, "broadcast at a.py:60", 10**9), *seen[4:]]
    for rank in range(3):
        board.slot(rank).mirror(7 if rank == 0 else 6, 6 if rank == 0 else 5, astray if rank == 0 else seen[:4])
    mismatch = board.first_mismatch()
    assert mismatch is not None
    assert (mismatch.number, mismatch.sides[0]) == (6, ((0,), "broadcast at a.py:60"))


def test_steps_and_waiting_are_added_up() -> None:
    board = StatusBoard.create(2)
    slot = board.slot(1)
    for number in range(3):
        slot.begin_collective(number, "a")
        slot.end_collective(500_000_000)
        slot.step(number + 1)
    assert (slot.steps, slot.waited) == (3, 1.5)
    assert (board.slot(0).steps, board.slot(0).waited) == (0, 0.0)


def test_a_rank_that_has_not_come_yet_is_not_apart() -> None:
    board = StatusBoard.create(2)
    fast, slow = board.slot(0), board.slot(1)
    for number in range(10):
        fast.begin_collective(number, "a")
        fast.end_collective()
    slow.begin_collective(0, "a")
    slow.end_collective()
    assert board.mismatch_at(5) is None


def test_what_is_too_long_ago_is_forgotten_and_not_compared() -> None:
    board = StatusBoard.create(2)
    fast, slow = board.slot(0), board.slot(1)
    for number in range(RING + 1):
        fast.begin_collective(number, "a")
        fast.end_collective()
    slow.begin_collective(77, "b")
    slow.end_collective()
    assert not board.remembers(0, 1)
    assert board.remembers(0, 2)
    assert not board.remembers(1, 2)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([1], "rank 1"), ([0, 2], "ranks 0 and 2"), ([0, 1, 3], "ranks 0, 1 and 3")],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_the_seats_of_a_machine_have_the_ranks_of_the_run() -> None:
    board = StatusBoard.create(2, 3)
    for rank in (3, 4):
        board.slot(rank).begin_collective(rank, f"{rank}")
    assert [board.read(rank).text for rank in board.ranks] == ["3", "4"]
    assert not board.remembers(0, 1)
    assert str(board.first_mismatch()).endswith("rank 3 called 3, rank 4 called 4")


pytestmark = pytest.mark.skipif(not is_possible(), reason="ranks meet in shared memory")


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_meet_or_none(seed: int) -> None:
    """Each leaves out some operations, and makes others alone. Where they meet, they call a collective."""

    def work(ranks: ProcessCollectives) -> list[tuple[int, str]]:
        common, own = random.Random(seed), random.Random(seed * 7 + ranks.rank)
        met = []
        for epoch in range(60):
            together = common.random() < 0.5
            for number in range(common.randrange(4)):
                name = f"{number % 2} in epoch {epoch}"
                if not together and own.random() < 0.3:
                    continue
                if not together and own.random() < 0.2:
                    name = f"{own.random()}"
                found = ranks.meet(name)
                assert found or not together
                if found:
                    met.append((epoch, name))
                    torch.testing.assert_close(ranks.broadcast(torch.tensor([ranks.rank + 5]), 0).item(), 5)
            ranks.barrier()
        ranks.leave()
        return met

    found = all_well(in_processes(3, work, nearby=True))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 30


def test_no_rank_waits_for_one_that_has_left() -> None:
    def work(ranks: ProcessCollectives) -> bool:
        if ranks.rank == 0:
            ranks.leave()
            return False
        return ranks.meet("anything")

    assert all_well(in_processes(2, work, nearby=True)) == [False, False]


def test_a_rank_that_waits_is_seen() -> None:
    """By the command process, which names what it waits in."""
    board = StatusBoard.create(2)
    slot = board.slot(1)
    slot.begin_collective(1, "all_reduce at train.py:1")
    slot.end_collective()
    slot.begin_wait("mkdir at train.py:2")
    progress = board.read(1)
    assert (progress.waiting, progress.number, progress.text) == (True, 2, "mkdir at train.py:2")
    slot.end_wait()
    assert not board.read(1).waiting
    assert board.first_mismatch() is None
