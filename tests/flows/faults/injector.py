"""The one hook by which faults come into a run: `fault@rank:step`, among a script's arguments.

A script that takes part calls `strike(step)` in each step. The rank that is to fail writes the truth (fault, rank,
step, time) into the file that DUOKA_TRUTH names, then fails.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import posix
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from leftovers import listeners, sockets


@dataclass(frozen=True)
class Fault:
    """One fault: its name, the rank that it comes to, and the step."""

    name: str
    rank: int
    step: int

    @classmethod
    def of(cls, word: str) -> Fault:
        name, rank, step = re.split("[@:]", word)
        return cls(name, int(rank), int(step))


@lru_cache
def asked() -> Fault | None:
    """The fault that the command line asks for."""
    return next((Fault.of(word) for word in sys.argv if "@" in word), None)


@lru_cache
def workers() -> tuple[int, list[int]]:
    """Return the command's pid, and those of the workers, in the order of ranks, and of the reaper, the last one."""
    parent = os.getppid()
    with open(f"/proc/{parent}/task/{parent}/children", "rb") as file:
        return parent, sorted(map(int, file.read().split()))


@lru_cache
def rank() -> int:
    """This worker's rank: a plain script is not told."""
    return workers()[1].index(os.getpid())


def is_due(step: int, *names: str) -> bool:
    """Whether this rank is to fail in this step, by one of these faults. If so the truth is written down."""
    fault = asked()
    if fault is None or fault.name not in names or (fault.rank, fault.step) != (rank(), step):
        return False
    write_truth(fault)
    return True


def write_truth(fault: Fault) -> None:
    """Tell what is about to happen, when, and at which sockets the run listens."""
    command, pids = workers()
    held = set().union(*map(sockets, (command, *pids)))
    truth = {
        "fault": fault.name,
        "rank": fault.rank,
        "step": fault.step,
        "listening": sorted(held.intersection(listeners())),
        "time": time.clock_gettime(time.CLOCK_MONOTONIC),
    }
    file = posix.open(os.environ["DUOKA_TRUTH"], os.O_WRONLY | os.O_CREAT)
    os.write(file, json.dumps(truth).encode())
    os.close(file)


def strike(step: int) -> None:
    """Fail, if it is this rank's turn."""
    if is_due(step, *FAULTS):
        fault = asked()
        assert fault is not None
        FAULTS[fault.name]()


def _raise() -> NoReturn:
    raise ValueError("injected")


def _kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _ask_the_command(*numbers: signal.Signals) -> Callable[[], None]:
    """Send these signals to the command process, one after the other, and answer none but the last."""

    def ask() -> None:
        for number in numbers[:-1]:
            with suppress(KeyboardInterrupt):
                os.kill(workers()[0], number)
                time.sleep(600)
        os.kill(workers()[0], numbers[-1])
        time.sleep(600)

    return ask


def _segfault() -> None:
    ctypes.string_at(1)


def _raise_at_exit() -> None:
    atexit.register(_raise)


def _die_at_exit() -> None:
    atexit.register(_kill(signal.SIGKILL))


def _raise_and_die_at_exit() -> NoReturn:
    _die_at_exit()
    _raise()


def _raise_and_stay() -> NoReturn:
    """Raise, and leave a thread that python waits for before it ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(600,)).start()
    _raise()


def _sleep() -> None:
    time.sleep(600)


def _sleep_a_while() -> None:
    time.sleep(1.2)


def _work_a_while() -> None:
    until = time.clock_gettime(time.CLOCK_MONOTONIC) + 1.5
    while time.clock_gettime(time.CLOCK_MONOTONIC) < until:
        pass


def _hold_the_lock() -> None:
    re.match("(a+)+$", "a" * 64 + "b")


def _run_out_of_memory() -> None:
    import torch

    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
    torch.empty(1 << 28).fill_(1.0)


def _run_out_of_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = [open(os.devnull) for _ in range(100)]  # noqa: SIM115
    assert not files


def _leave_a_child() -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    posix.posix_spawn(sys.executable, [sys.executable, "-c", stubborn], os.environ)
    time.sleep(0.2)
    _raise()


FAULTS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "atexit": _raise_at_exit,
    "child": _leave_a_child,
    "command-hup": _ask_the_command(signal.SIGHUP),
    "command-int": _ask_the_command(signal.SIGINT),
    "command-int-int": _ask_the_command(signal.SIGINT, signal.SIGINT),
    "command-kill": _ask_the_command(signal.SIGKILL),
    "command-term": _ask_the_command(signal.SIGTERM),
    "dies-at-exit": _die_at_exit,
    "exit-0": lambda: sys.exit(0),
    "exit-3": lambda: sys.exit(3),
    "files": _run_out_of_files,
    "interrupt": _kill(signal.SIGINT),
    "kill": _kill(signal.SIGKILL),
    "lock": _hold_the_lock,
    "memory": _run_out_of_memory,
    "os-exit-1": lambda: os._exit(1),
    "raise": _raise,
    "raise-die": _raise_and_die_at_exit,
    "raise-stay": _raise_and_stay,
    "segfault": _segfault,
    "sleep": _sleep,
    "slow": _sleep_a_while,
    "stop": _kill(signal.SIGSTOP),
    "work": _work_a_while,
}
