"""Allocation of GPUs by many real processes at a time, on a machine of eight of which 0, 2 and 5 are in use."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from duoka.errors import DeviceError, DevicesBusy
from duoka.hardware import inventory, locks
from duoka.hardware.allocation import Allocation, allocate, with_holders
from duoka.hardware.choice import Choice, choose
from duoka.hardware.locks import Locks
from duoka.hardware.spec import parse
from tests.hardware.driver import play

ROOT = Path(__file__).parents[2]


class Rush:
    """The processes of tests/hardware/rush.py. said: output of each, in order. pids: by index."""

    def __init__(self, folder: Path, wait: float, requests: list[str], recording: str = "eight") -> None:
        words = [sys.executable, "-m", "tests.hardware.rush", recording, str(folder), str(wait), *requests]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0)
        self.pids: dict[int, int] = {}
        self.said: dict[int, list[str]] = {index: [] for index in range(len(requests))}
        self._rest = b""

    def until(self, holds: Callable[[], bool]) -> None:
        """Read output until the condition holds."""
        assert self.process.stdout is not None
        while not holds():
            assert select.select([self.process.stdout], [], [], 30)[0], self.said
            *lines, self._rest = (self._rest + os.read(self.process.stdout.fileno(), 1 << 16)).split(b"\n")
            for line in lines:
                index, pid, text = line.decode().split(maxsplit=2)
                self.pids[int(index)] = int(pid)
                self.said[int(index)].append(text)

    def last(self, word: str) -> dict[int, str]:
        """Return the last output of each process that begins with `word`, without it."""
        return {index: texts[-1][len(word) + 1 :] for index, texts in self.said.items() if _starts_with(texts, word)}

    def let_go(self, index: int) -> None:
        """End one process, which releases its GPUs."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{index}\n".encode())

    def close(self) -> None:
        self.process.communicate()


def _starts_with(texts: list[str], word: str) -> bool:
    return bool(texts) and texts[-1].startswith(word)


@pytest.fixture
def rush(tmp_path: Path) -> Iterator[Callable[..., Rush]]:
    started: list[Rush] = []

    def start(wait: float, *requests: str, recording: str = "eight") -> Rush:
        started.append(Rush(tmp_path, wait, list(requests), recording))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_many_that_start_at_the_same_moment_never_pick_the_same_card(rush: Callable[..., Rush]) -> None:
    crowd = rush(0, *["free:1", "best:1"] * 10)
    crowd.until(lambda: len(crowd.last("has")) + len(crowd.last("refused")) == 20)
    taken = list(crowd.last("has").values())
    assert len(set(taken)) == len(taken)
    assert {"GPU 1", "GPU 3", "GPU 4", "GPU 6", "GPU 7"} <= set(taken)
    assert all("queues until they are free" in why for why in crowd.last("refused").values())


def test_parts_of_a_card_are_kept_apart_too(rush: Callable[..., Rush]) -> None:
    crowd = rush(0, *["free:1"] * 6, recording="mig")
    crowd.until(lambda: len(crowd.last("has")) + len(crowd.last("refused")) == 6)
    assert list(crowd.last("has").values()) == ["GPU 0:2"]


def test_who_waits_gets_cards_as_they_come_free_and_every_card_has_one_at_a_time(rush: Callable[..., Rush]) -> None:
    crowd = rush(60, *["free:2"] * 6)
    done: set[int] = set()

    def somebody_new_has_some() -> bool:
        return len(crowd.last("has")) > len(done)

    while len(done) < 6:
        crowd.until(somebody_new_has_some)
        holding = {index: crowd.last("has")[index] for index in crowd.last("has").keys() - done}
        cards = " ".join(holding.values()).replace("GPU ", "").split()
        assert len(set(cards)) == len(cards) <= 5
        done |= holding.keys()
        for index in holding:
            crowd.let_go(index)


def test_killed_ones_give_back_what_they_have_and_their_place_in_the_queue(rush: Callable[..., Rush]) -> None:
    first = rush(0, "free:5")
    first.until(lambda: len(first.last("has")) == 1)
    early = rush(60, "free:5")
    early.until(lambda: len(early.last("waits")) == 1)
    late = rush(60, "free:1")
    late.until(lambda: len(late.last("waits")) == 1)
    os.kill(early.pids[0], signal.SIGKILL)
    os.kill(first.pids[0], signal.SIGKILL)
    late.until(lambda: len(late.last("has")) == 1)


def test_first_come_first_served_and_one_that_wants_many_does_not_starve(
    rush: Callable[..., Rush], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = rush(0, *["free:1"] * 5)
    holders.until(lambda: len(holders.last("has")) == 5)
    many = rush(60, "free:4")
    many.until(lambda: len(many.last("waits")) == 1)
    one = rush(60, "free:1")
    one.until(lambda: len(one.last("waits")) == 1)
    for index in (0, 1, 2):
        holders.let_go(index)
    # three GPUs are free now; neither later processes in the queue nor processes that do not wait take them
    one.until(lambda: "run 0 (pid " in one.said[0][-1] and "is ahead in the queue for it" in one.said[0][-1])
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path)
    with pytest.raises(DevicesBusy, match=rf"run 0 \(pid {many.pids[0]}\) is ahead in the queue for it"):
        _allocate("free:1")
    holders.let_go(3)
    many.until(lambda: len(many.last("has")) == 1)
    assert not one.last("has")
    holders.let_go(4)
    one.until(lambda: len(one.last("has")) == 1)


def _allocate(text: str, wait: float = 0, say: Callable[[str], None] = lambda text: None) -> Allocation[Choice]:
    asked = parse(text)
    return allocate(asked, "mine", lambda found: choose(asked, found), lambda it: it.devices, wait, say)


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path / "locks")
    return tmp_path / "locks"


def _numbers(allocation: Allocation[Choice]) -> list[int | None]:
    return [device.index for device in allocation.decided.devices]


def test_who_waits_keeps_no_more_than_it_wants_and_can_use(eight: Path) -> None:
    with Locks() as here:
        _, place = here.join("free:1,mem>=79G", "4,6,9", "other")
    with _allocate("free:4").locks as held:
        assert held is not None
        with Locks() as here:
            known = with_holders(inventory.read(), here)
        assert [gpu.index for gpu in known.gpus if gpu.awaited is not None] == [4]
        assert known.gpus[4].awaited is not None
        assert known.gpus[4].awaited.command == "other"
    place.close()


def test_who_wants_several_is_kept_no_part_of_a_card(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    with Locks() as here:
        places = [here.join(request, None, "other")[1] for request in ("free:2", "best:1,mem>=9G")]
    allocation = _allocate("free:1")
    assert [device.number for device in allocation.decided.devices] == ["0:2"]
    with pytest.raises(DevicesBusy, match=r"GPU 0:0: other \(pid [0-9]+\) is ahead in the queue for it"):
        _allocate("best:1")
    for held in (*places, allocation.locks):
        held.close()


def test_named_cards_are_waited_for_too(eight: Path) -> None:
    first = _allocate("3,4")
    assert _numbers(first) == [3, 4]
    again = _allocate("4,")  # named, and nobody waits: shared, and noted
    assert again.notes[0].startswith("GPU 4 is also used by mine (pid ")
    for text in ("4,", "GPU-44c05a1b", "0,", "auto"):
        with pytest.raises(DevicesBusy, match=r"GPU [04]: "):
            _allocate(text, wait=0.01)
    first.locks.close()
    again.locks.close()
    assert _numbers(_allocate("4,", wait=0.01)) == [4]


def test_what_others_put_into_the_queue_harms_nobody(eight: Path) -> None:
    held = []
    for request, visible in (("free:99", None), ("no:such", None), ("free:1", "99"), ("MIG-1", None)):
        with Locks() as here:
            held.append(here.join(request, visible, "odd")[1])
    with Locks() as here:
        assert [waiting.number for waiting in here.queue()] == [1, 2, 3, 4]
    for number, text in enumerate(("", "{", "[]", '{"request": 3}', '{"request": "free:1", "holder": 7}'), 5):
        with Locks() as here:
            held.append(here.join("free:1", None, "odd")[1])
        (eight / f"{number}.waits").write_text(text)
    assert len(_allocate("free:4").decided.devices) == 4
    for one in held:
        one.close()
    with Locks() as here:
        assert here.queue() == []
    assert list(eight.glob("*.waits")) == []


def test_nothing_is_picked_where_locks_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path / "file" / "below")
    for text in ("free:1", "best:1"):
        with pytest.raises(DeviceError, match="Not a directory; give GPU numbers instead"):
            _allocate(text)
    assert "Not a directory" in _allocate("3,").notes[0]
    assert _allocate("cpu:2").notes == ()


def test_cards_that_disappear_while_one_waits(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    first = _allocate("free:5")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        recording["cards"] = recording["cards"][:2]

    monkeypatch.setattr("duoka.hardware.allocation.STEP", 0.01)
    with pytest.raises(DeviceError, match="5 GPUs are asked for; 2 GPUs can be used here") as error:
        _allocate("free:5", 30, say)
    assert not isinstance(error.value, DevicesBusy)
    assert len(said) == 1
    first.locks.close()
