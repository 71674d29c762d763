"""Restart the workers after a fault, from the process that has imported torch already, as another attempt.

A fault is an end that the script did not choose: a rank that is killed, crashes, hangs, leaves early or raises.
A requested end (a signal to the command process, `sys.exit` on all ranks, exit code 75 after a save) and an error
that would come again (a wrong option, a missing script) are not followed by a restart.

A batch is global, so a run goes on without a lost device, or with fewer rows on a rank whose memory ran out, and the
same numbers.
"""

from __future__ import annotations

import re
import select
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from duoka import errors
from duoka.hardware.inventory import Inventory, problems
from duoka.launchers.hints import MEMORY
from duoka.launchers.processes import Signals, signal_name
from duoka.launchers.verdict import Verdict
from duoka.launchers.workers import Worker
from duoka.planning.plan import Kind, Plan, ratio
from duoka.private.texts import LOST_GPU, says
from duoka.supervision.status_board import name_ranks

AGAIN = 75  # `duoka.checkpoint.checkpoint`: the script has saved, and its caller restarts it
SHORT = 10.0  # seconds: the cause of an earlier failure may persist
LONGEST_PAUSE = 60.0
LESS = 0.7  # of its rows, for a rank whose memory ran out
SIZES = (  # in torch's error: asked for, free, in use, and kept for later
    r"Tried to allocate ([\d.]+) (\w+)",
    r"of which ([\d.]+) (\w+) is free",
    r"([\d.]+) (\w+) is allocated by PyTorch",
    r"([\d.]+) (\w+) is reserved by PyTorch but",
)
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def with_restarts(
    attempt: Callable[[int], Verdict], most: int, signals: Signals, write: Callable[[str], None]
) -> int:
    """Make attempts until one does not end by a fault or `most` restarts are used up; return the last exit code.

    The first restart is at once. If attempts fail within seconds one after the other, each waits twice as long as the
    one before: an outside cause (a full disk, a server) has time to pass.

    attempt: runs all workers once, given its number: 0, 1, ... most: restarts that are allowed. write: prints a line.
    """
    short = 0  # attempts in a row
    saved: int | None = None
    for number in range(most + 1):
        begin = time.monotonic()
        verdict = attempt(number)
        took = time.monotonic() - begin
        answered = len(signals.for_scripts)  # passed on to this attempt's workers
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
        origin = "" if saved is None else f", from the checkpoint of step {saved},"
        waits = f" in {pause:g} s, as the one before failed within {max(took, 0.1):.1f} s," if pause else ""
        write(f"duoka: restart {number + 1} of {most}{origin}{waits} after: {cause(verdict)}\n")
        if asked := _pause(pause, signals, answered):
            return _stopped(asked, write)
    return verdict.code


def is_fault(verdict: Verdict) -> bool:
    """Return whether the workers ended against the script's will, so that a restart may help."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.fault
    if verdict.why in ("well", "stopped") or (verdict.stuck is not None and verdict.stuck.at_exit):
        return False  # at exit: the scripts have ended, and their work is done
    endings = [worker.ending for worker in verdict.culprits if worker.ending is not None]
    if any(ending.how == "exited" and ending.code == AGAIN for ending in endings):
        return False
    if any(ending.how == "raised" and _would_come_again(ending.kind) for ending in endings):
        return False
    # If all agree, sys.exit was the script's choice, and an exception was not; but for BrokenPipeError, when the
    # reader of the output, such as `head`, is gone.
    return verdict.why != "agreed" or any(end.how == "raised" and end.kind != "BrokenPipeError" for end in endings)


def cause(verdict: Verdict) -> str:
    """Describe what ended an attempt in a few words."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.cause
    if verdict.stuck is not None and verdict.stuck.mismatch is not None:
        return "the ranks called different collectives"
    if verdict.stuck is not None and verdict.stuck.at_exit:
        return f"the processes of {name_ranks(verdict.stuck.missing)} did not exit"
    if verdict.stuck is not None:
        missing = verdict.stuck.missing or verdict.stuck.waiting
        return f"{name_ranks(missing)} {'did not come' if verdict.stuck.missing else 'hung'}"
    who, first = name_ranks(verdict.ranks), verdict.culprits[0]
    if verdict.why == "left":
        return f"{who} left while others went on"
    if first.ending is not None and first.ending.how == "raised":
        return f"{who} raised {first.ending.error.splitlines()[-1]}"
    if first.status is not None and first.status < 0:
        return f"{who} was killed by {signal_name(-first.status)}"
    return f"{who} exited with code {verdict.code}"


def _would_come_again(kind: str) -> bool:
    """Return whether an error of this class is one that a restart would repeat, or KeyboardInterrupt."""
    error = getattr(errors, kind, None)
    refused = isinstance(error, type) and issubclass(error, (errors.AskedError, errors.Refused))
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
        select.select([signals.fd], [], [], left)  # unlike a sleep, it returns at a signal
        signals.read()
    return asked


def _stopped(asked: signal.Signals, write: Callable[[str], None]) -> int:
    """Report a request to end that came between two attempts, and return the exit code."""
    write(f"duoka: {'interrupted' if asked is signal.SIGINT else 'stopped'}\n")
    return 128 + asked


# The plan of the next attempt.


def next_plan(plan: Plan, verdict: Verdict, read: Callable[[str], Inventory], say: Callable[[str], None]) -> Plan:
    """Return the plan of the attempt after one that ended by a fault; `say` prints how it differs.

    It is the same for several machines, each of which knows its own devices only, and for a script with its own
    torch.distributed, whose batches would be other ones. read: the devices of this machine as they are now.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1 or plan.is_for_one:
        return plan
    if lost := lost_devices(plan, verdict, read):
        return _without(plan, lost, say)
    weights = with_fewer_rows(plan, verdict) if plan.measures_rows else ()
    if weights:
        short = name_ranks(verdict.ranks)
        say(f"memory ran out on {short}: the next attempt begins with --rows {ratio(weights)}")
    return replace(plan, weights=weights or plan.weights)


def with_fewer_rows(plan: Plan, verdict: Verdict) -> tuple[float, ...]:
    """Return weights of shares with less for the ranks whose memory ran out; empty if that is not what happened."""
    parts = {worker.rank: part_to_try(_error(worker)) for worker in verdict.culprits}
    if plan.machines.count > 1 or not 0 < len(parts) < plan.workers or not all(parts.values()):
        return ()
    before = verdict.rows if verdict.rows and all(verdict.rows) else plan.weights or (1,) * plan.workers
    return tuple(weight * parts.get(rank, 1) for rank, weight in enumerate(before))


def part_to_try(error: str) -> float:
    """Return which part of a rank's rows to try after its memory ran out; 0 if the error tells of something else.

    The step would have used more than the error tells: this is a guess, but no more than what is known not to fit.
    """
    if not re.search(MEMORY, error):
        return 0.0
    sizes = [re.search(pattern, error) for pattern in SIZES]
    asked, free, used, kept = (float(size[1]) * UNITS[size[2]] if size is not None else 0.0 for size in sizes)
    return min(LESS, (free + used + kept) / (used + asked)) if used else LESS


def lost_devices(plan: Plan, verdict: Verdict, read: Callable[[str], Inventory]) -> dict[int, str]:
    """Return the local ranks whose device cannot be used any more, with what the driver says of it, if anything."""
    first, kind = plan.ranks.start, plan.devices[0].type
    lost = {worker.rank - first: "" for worker in verdict.culprits if says(_error(worker), *LOST_GPU)}
    if kind != "cpu":
        lost |= {rank: problem for rank, problem in enumerate(problems(plan.devices, read(kind))) if problem}
    return lost


def _error(worker: Worker) -> str:
    return worker.ending.error if worker.ending is not None else ""


def _without(plan: Plan, lost: Collection[int], say: Callable[[str], None]) -> Plan:
    left = [rank for rank in range(plan.workers) if rank not in lost]
    if not left:
        return plan
    for rank in sorted(lost):
        device = plan.devices[rank]
        say(f"{device}{f' ({device.name})' if device.name else ''} of rank {rank} is lost, and left out from now on")
    alone = len(left) == 1 and plan.strategy != "exact"
    return replace(
        plan,
        devices=tuple(plan.devices[rank] for rank in left),
        strategy="single" if alone else plan.strategy,
        weights=tuple(plan.weights[rank] for rank in left) if plan.weights and len(left) > 1 else (),
        measures_rows=plan.measures_rows and len(left) > 1,
    )
