from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from duoka.hardware import locks as locks_module
from duoka.hardware.locks import Locks

TAKE = """
import os, sys
from pathlib import Path
from duoka.hardware.locks import Locks
with Locks(Path(sys.argv[1])) as locks:
    free = [uuid for uuid in sys.argv[3:] if locks.holder(uuid) is None][: int(sys.argv[2])]
    held, others = locks.hold(free, f"test {os.getpid()}")
if os.fork() == 0:  # a worker, which holds the locks, too
    sys.stdin.read()
    os._exit(0)
print(*free, flush=True)
sys.stdin.read()
"""


def start(folder: Path, count: int, *uuids: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TAKE, folder, str(count), *uuids]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_processes_that_start_at_once_take_different_cards(tmp_path: Path) -> None:
    cards = [f"GPU-{index}" for index in range(8)]
    processes = [start(tmp_path, 2, *cards) for _ in range(4)]
    taken = [card for process in processes for card in said(process)]
    assert sorted(taken) == cards
    with Locks(tmp_path) as locks:
        holders = {card: locks.holder(card) for card in cards}
    assert {holder.command for holder in holders.values() if holder} == {f"test {one.pid}" for one in processes}
    for process in processes:
        process.communicate()


def test_the_kernel_frees_a_lock_when_the_last_holder_is_gone(tmp_path: Path) -> None:
    process = start(tmp_path, 1, "GPU-a")
    assert said(process) == ["GPU-a"]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Locks(tmp_path) as locks:
        assert locks.holder("GPU-a") is not None  # its worker lives on
    assert process.stdin is not None
    process.stdin.close()
    assert process.stdout is not None
    process.stdout.read()  # until the worker is gone, too
    with Locks(tmp_path) as locks:
        assert locks.holder("GPU-a") is None
        held, others = locks.hold(["GPU-a"], "mine")
    assert others == {}
    held.close()
    process.stdout.close()


def test_who_has_it_is_told(tmp_path: Path) -> None:
    with Locks(tmp_path) as locks:
        held, none = locks.hold(["GPU-a", "GPU-b"], "first")
        again, others = locks.hold(["GPU-b", "GPU-c"], "second")
    assert none == {}
    assert {uuid: (other.command, other.pid) for uuid, other in others.items()} == {"GPU-b": ("first", os.getpid())}
    held.close()
    held.close()
    with Locks(tmp_path) as locks:
        assert locks.holder("GPU-b") is None
        assert locks.holder("GPU-c") is not None
    again.close()


def test_a_lock_file_with_anything_in_it_still_locks(tmp_path: Path) -> None:
    for text in ("", "{", "[1]", json.dumps({"pid": 1, "who": 2}), json.dumps({"pid": 1})):
        with Locks(tmp_path) as locks:
            held, _ = locks.hold(["GPU-a"], "mine")
            (tmp_path / "GPU-a.lock").write_text(text)
            holder = locks.holder("GPU-a")
        assert holder is not None
        assert holder.command == "another program"
        held.close()


def test_where_no_lock_can_be_kept_nothing_is_taken_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Locks(tmp_path / "file" / "below") as locks:
        assert "Not a directory" in locks.problem
        assert locks.holder("GPU-a") is None
        held, others = locks.hold(["GPU-a"], "mine")
    assert others == {}
    held.close()


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with Locks(tmp_path) as locks:
        assert "belongs to another user" in locks.problem


def test_a_stopped_process_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks_module, "MUTEX_LIMIT", 0.05)
    with Locks(tmp_path), Locks(tmp_path) as second:
        assert "is it stopped?" in second.problem
    with Locks(tmp_path) as third:
        assert third.problem == ""
