"""A fault during a save never damages an earlier checkpoint."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import duoka
from duoka.system import disk
from tests.checkpoint.nets import Net, same
from tests.checkpoint.runs import die, fail, fault, filled, in_child, small, value_in


def save_next(directory: Path, value: float = 2) -> None:
    """Restore, and save `value` as the next step."""
    saved = small(directory, value)
    saved.restore()
    saved._states.objects["model"].load_state_dict(filled(value).state_dict())
    saved._states.objects["note"][:] = [value]
    saved.step_number += 1
    saved.save()
    saved.close()


@pytest.fixture
def saved_once(tmp_path: Path) -> Path:
    """Create a directory with one checkpoint, of value 1."""
    with small(tmp_path / "out", 1) as saved:
        saved.save()
    return tmp_path / "out"


def count_calls(directory: Path, act: Callable[[Path], None], patch: pytest.MonkeyPatch) -> int:
    """Count the calls of a save, on a copy."""
    shutil.copytree(directory, directory.with_name("tried"))
    with fault(patch, -1, fail) as calls:
        act(directory.with_name("tried"))
    return len(calls)


def test_a_kill_at_every_call_leaves_the_old_or_the_new(
    saved_once: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = count_calls(saved_once, save_next, monkeypatch)
    found = []
    for number in range(count):
        directory = saved_once.with_name(f"at-{number}")
        shutil.copytree(saved_once, directory)

        def act(directory: Path = directory, number: int = number) -> None:
            with fault(monkeypatch, number, die):
                save_next(directory)

        assert in_child(act) == -signal.SIGKILL, number
        found.append(value_in(directory))
        assert not list(directory.glob(".*.partial"))
        save_next(directory, 3)  # and the next run continues
        assert value_in(directory) == 3
    with capsys.disabled():
        print(
            f" [killed at each of {count} calls: {found.count(1)} times the old, {found.count(2)} times the new]",
            end="",
        )
    assert count > 15
    assert found == sorted(found)  # the old value up to some call, the new one after it


def failure(act: Callable[[], None], number: int, patch: pytest.MonkeyPatch) -> str:
    """Let the call of this number fail; returns the error message, or ""."""
    try:
        with fault(patch, number, fail):
            act()
    except duoka.DuokaError as error:
        return str(error)
    return ""


def test_a_failure_of_every_call_leaves_the_old_or_the_new(
    saved_once: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = count_calls(saved_once, save_next, monkeypatch)
    told = 0
    for number in range(count):
        directory = saved_once.with_name(f"at-{number}")
        shutil.copytree(saved_once, directory)
        failed = failure(lambda directory=directory: save_next(directory), number, monkeypatch)  # type: ignore[misc]
        told += "No space left on device" in failed
        # Without a failure it was the making of a directory that is there already.
        assert value_in(directory) in ((1, 2) if failed else (2,))
        assert not list(directory.glob(".*.partial"))
        save_next(directory, 3)
        assert value_in(directory) == 3
    with capsys.disabled():
        print(f" [failed at each of {count} calls, and said so {told} times]", end="")
    assert count - 2 <= told
    assert count > 15


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_weights_are_the_old_or_the_new_at_every_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, found = Net(), Net(), Net()
    with fault(monkeypatch, -1, fail) as calls:
        duoka.save_weights(old, tmp_path / "tried" / name)
    for act, ends in ((die, [-signal.SIGKILL]), (fail, [0, 1])):  # 0: the directory is there already
        for number in range(len(calls)):
            path = tmp_path / f"{act.__name__}-{number}" / name
            duoka.save_weights(old, path)

            def write(path: Path = path, number: int = number, act: Callable[[str], None] = act) -> None:
                with fault(monkeypatch, number, act):
                    duoka.save_weights(new, path)

            ended = in_child(write)
            assert ended in ends, number
            duoka.load_weights(found, path)
            assert same(found, new) or (same(found, old) and ended != 0)
            duoka.save_weights(new, path)  # also removes what a killed process left
            assert os.listdir(path.parent) == [name]
    beside = disk.partial(path)
    beside.touch()  # of a process that runs
    duoka.save_weights(new, path)
    assert beside.exists()


def seconds_of_a_save(directory: Path) -> float:
    """Measure a save in a new process under the present load, on a copy."""
    shutil.copytree(directory, directory.with_name("timed"))
    begin = time.monotonic()
    assert in_child(lambda: save_next(directory.with_name("timed"))) == 0
    shutil.rmtree(directory.with_name("timed"))
    return time.monotonic() - begin


def sweep(directory: Path, rounds: int) -> tuple[int, int]:
    """Kill a run that saves repeatedly, at times spread over its saves; returns how often each outcome occurred."""
    partial = progress = 0
    last = value_in(directory)
    took = seconds_of_a_save(directory)
    for number in range(rounds):
        if number % 25 == 24:  # the load of the machine may have changed
            took = seconds_of_a_save(directory)
        pid = os.fork()
        if pid == 0:
            with_value = last
            while True:
                with_value += 1
                save_next(directory, with_value)
        time.sleep(0.002 + 2.5 * took * (number * 0.618 % 1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        partial += bool(list(directory.glob(".*.partial")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no checkpoint is damaged
            value = value_in(directory)
        assert value >= last
        progress += value > last
        last = value
    return partial, progress


def test_kills_at_moments_that_sweep(saved_once: Path) -> None:
    partial, progress = sweep(saved_once, 10)
    assert partial
    assert progress


@pytest.mark.long
def test_hundreds_of_kills_at_moments_that_sweep(saved_once: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial, progress = sweep(saved_once, 500)
    with capsys.disabled():
        print(f" [500 kills: {partial} within a save; after {progress} something new was there]", end="")
    assert partial > 50
    assert progress > 50


def test_a_full_disk(saved_once: Path) -> None:
    """The kernel refuses, instead of an injected error."""

    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(duoka.CheckpointError, match="File too large"):
            save_next(saved_once)

    assert in_child(act) == 0
    assert value_in(saved_once) == 1
    assert not list(saved_once.glob(".*.partial"))


def test_files_that_are_cut_off_anywhere(saved_once: Path, tmp_path: Path) -> None:
    save_next(saved_once)
    newest = saved_once / "step-00000001"
    rng = random.Random(0)
    for path in sorted(newest.iterdir()):
        size = path.stat().st_size
        for left in {0, 1, size - 1, *(rng.randrange(size) for _ in range(3))}:
            shutil.copytree(saved_once, tmp_path / "cut")
            os.truncate(tmp_path / "cut" / newest.name / path.name, left)
            with pytest.warns(UserWarning, match="using step-00000000"):
                assert value_in(tmp_path / "cut") == 1
            shutil.rmtree(tmp_path / "cut")


def test_a_loaders_worker_that_outlives_its_run_does_not_hold_the_lock(saved_once: Path) -> None:
    ready, say_ready = os.pipe()
    lives, let_live = os.pipe()

    def act() -> None:
        small(saved_once, 2).restore()
        if os.fork() == 0:  # as a loader's worker
            os.close(let_live)
            os.write(say_ready, b".")
            os.read(lives, 1)  # until the test has closed its end
            os._exit(0)
        os.read(ready, 1)
        die("")

    assert in_child(act) == -signal.SIGKILL
    save_next(saved_once)
    os.close(let_live)
    assert value_in(saved_once) == 2


def test_a_run_that_was_killed_does_not_hold_the_lock(saved_once: Path) -> None:
    def act() -> None:
        small(saved_once, 2).restore()
        die("")

    assert in_child(act) == -signal.SIGKILL
    save_next(saved_once)
    assert value_in(saved_once) == 2


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: Any) -> None: ...


def test_a_state_that_fails_leaves_what_is_there(saved_once: Path) -> None:
    saved = duoka.Checkpoint(saved_once, {"model": filled(2), "note": [2.0], "other": Failing()})
    saved._restored = True
    with pytest.raises(RuntimeError, match="no state today"):
        saved.save()
    saved.close()
    assert value_in(saved_once) == 1
