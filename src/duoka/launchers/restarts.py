"""Restart the workers after a fault, from the process that has imported torch already.

A fault is an end that the script did not choose: a rank that is killed, crashes, hangs, leaves early or raises.
A requested end (a signal to the command process, `sys.exit` on all ranks, exit code 75 after a save) and an error
that would come again (a wrong option, a missing script) are not followed by a restart.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable

from duoka import errors
from duoka.launchers import signals as names
from duoka.launchers.signals import Signals
from duoka.launchers.verdict import Verdict
from duoka.launchers.worker_group import Worker
from duoka.supervision.status_board import name_ranks

AGAIN = 75  # `duoka.checkpoint.preemption`: the script has saved, and its caller restarts it
SHORT = 10.0  # seconds: the cause of an earlier failure may persist
LONGEST_PAUSE = 60.0


def with_restarts(
    attempt: Callable[[int], Verdict], most: int, signals: Signals, write: Callable[[str], None]
) -> int:
    """Make attempts until one does not end by a fault or `most` restarts are used up; return the last exit code.

    The first restart is at once. If attempts fail within seconds one after the other, each waits twice as long as the
    one before: an outside cause (a full disk, a server) has time to pass.

    Args:
        attempt: runs all workers once, given the number of the attempt: 0, 1, ...
        most: number of restarts allowed.
        signals: those that reach the command process.
        write: prints a line.
    """
    short = 0  # attempts in a row
    saved: int | None = None
    for number in range(most + 1):
        begin = time.monotonic()
        verdict = attempt(number)
        took = time.monotonic() - begin
        answered = len(signals.for_scripts)
        if not most or not is_fault(verdict) or was_meant(verdict, signals):
            break
        signals.read()  # a scheduler signals ranks and this process in any order
        if asked := _asked(signals, answered):
            return _stopped(asked, write)
        if number == most:
            write(f"duoka: all {most} restarts are used up\n")
            break
        short = short + 1 if took < SHORT else 0
        pause = min(2.0 ** (short - 2), LONGEST_PAUSE) if short > 1 else 0.0
        saved = saved if verdict.saved is None else verdict.saved
        place = "" if saved is None else f", from the checkpoint of step {saved},"
        waits = f" in {pause:g} s, as the one before failed within {max(took, 0.1):.1f} s," if pause else ""
        write(f"duoka: restart {number + 1} of {most}{place}{waits} after: {cause(verdict)}\n")
        if asked := _pause(pause, signals, answered):
            return _stopped(asked, write)
    return verdict.code


def is_fault(verdict: Verdict) -> bool:
    """Return whether the workers ended against the script's will, so that a restart may help."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.fault
    if verdict.why in ("well", "stopped") or (verdict.stuck is not None and verdict.stuck.at_exit):
        return False
    endings = [worker.ending for worker in verdict.culprits if worker.ending is not None]
    if any(ending.how == "exited" and ending.code == AGAIN for ending in endings):
        return False
    if any(ending.how == "raised" and _is_an_answer(ending.kind) for ending in endings):
        return False
    # BrokenPipeError: the reader of the output, such as `head`, is gone
    return verdict.why != "agreed" or any(end.how == "raised" and end.kind != "BrokenPipeError" for end in endings)


def cause(verdict: Verdict) -> str:
    """Describe what ended an attempt in a few words."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.cause
    if verdict.stuck is not None and verdict.stuck.mismatch is not None:
        return "the ranks called different collectives"
    if verdict.stuck is not None and verdict.stuck.at_exit:
        return f"the processes of {name_ranks(list(verdict.stuck.missing))} did not exit"
    if verdict.stuck is not None:
        missing = verdict.stuck.missing or verdict.stuck.waiting
        return f"{name_ranks(list(missing))} {'did not come' if verdict.stuck.missing else 'hung'}"
    who, first = name_ranks([worker.rank for worker in verdict.culprits]), verdict.culprits[0]
    if verdict.why == "left":
        return f"{who} left while others went on"
    if first.ending is not None and first.ending.how == "raised":
        return f"{who} raised {first.ending.error.splitlines()[-1]}"
    return f"{who} {_end_of(first, verdict.code)}"


def _end_of(worker: Worker, code: int) -> str:
    if worker.status is not None and worker.status < 0:
        return f"was killed by {names.name(-worker.status)}"
    return f"exited with code {code}"


def _is_an_answer(kind: str) -> bool:
    """Return whether an error of this class is one that a restart would repeat, or KeyboardInterrupt."""
    found = getattr(errors, kind, None)
    refused = isinstance(found, type) and issubclass(found, (errors.AskedError, errors.Refused))
    return refused or kind == "KeyboardInterrupt"


def was_meant(verdict: Verdict, signals: Signals) -> bool:
    """Return whether the workers died of a signal meant for scripts that this process was sent and passed on."""
    return any(worker.status == -number for worker in verdict.culprits for number in signals.for_scripts)


def _asked(signals: Signals, answered: int) -> signal.Signals | None:
    """Return the first request to end; between attempts also a new signal for scripts, after `answered` ones."""
    return next(iter([*signals.stops, *signals.for_scripts[answered:]]), None)


def _pause(seconds: float, signals: Signals, answered: int) -> signal.Signals | None:
    """Wait, and return a request to end that came meanwhile."""
    deadline = time.monotonic() + seconds
    while (asked := _asked(signals, answered)) is None and (left := deadline - time.monotonic()) > 0:
        select.select([signals.fd], [], [], left)
        signals.read()
    return asked


def _stopped(asked: signal.Signals, write: Callable[[str], None]) -> int:
    """Report a request to end that came between two attempts, and return the exit code."""
    write(f"duoka: {'interrupted' if asked is signal.SIGINT else 'stopped'}\n")
    return 128 + asked
