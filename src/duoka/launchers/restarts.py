"""Starting the workers again after a fault, from the process that has imported torch already.

A fault is what a run did not mean: a rank that is killed, crashes, hangs, leaves early or raises. Whoever asked for
an end (a signal to the command process, `sys.exit` on all ranks, exit code 75 after a save) is not answered by a
new beginning, and what could not go well the next time either (a wrong option, no script) is not tried again.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable

from duoka import errors
from duoka.board import name_ranks
from duoka.launchers import signals as names
from duoka.launchers.crew import Worker
from duoka.launchers.signals import Signals
from duoka.launchers.verdict import Verdict

AGAIN = 75  # `duoka.checkpoint.preemption`: the script has saved, and its caller is to start it again
SHORT = 10.0  # seconds: an attempt that fails sooner may have failed for a reason that is still there
LONGEST_PAUSE = 60.0


def with_restarts(attempt: Callable[[int], Verdict], most: int, signals: Signals, tell: Callable[[str], None]) -> int:
    """Make attempts until one is not ended by a fault, or `most` restarts are used up; the last one's exit code.

    The first restart is at once. Where attempts fail within seconds again and again, each waits twice as long as the
    one before, so that what is wrong outside (a full disk, a server) has time to pass, and nothing spins.

    Args:
        attempt: one life of all workers, given its number: 0, 1, ...
        most: restarts that are allowed.
        signals: what reaches the command process meanwhile.
        tell: shows a line to whoever started the run.
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
        signals.read()  # a scheduler asks ranks and this process in any order
        if asked := _asked(signals, answered):
            return _stopped(asked, tell)
        if number == most:
            tell(f"duoka: no restart is left of {most}\n")
            break
        short = short + 1 if took < SHORT else 0
        pause = min(2.0 ** (short - 2), LONGEST_PAUSE) if short > 1 else 0.0
        saved = saved if verdict.saved is None else verdict.saved
        place = "" if saved is None else f", from the checkpoint of step {saved},"
        waits = f" in {pause:g} s, as the one before failed within {max(took, 0.1):.1f} s," if pause else ""
        tell(f"duoka: restart {number + 1} of {most}{place}{waits} after: {cause(verdict)}\n")
        if asked := _pause(pause, signals, answered):
            return _stopped(asked, tell)
    return verdict.code


def is_fault(verdict: Verdict) -> bool:
    """Whether the workers ended against the script's will, and may fare better another time."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.fault
    if verdict.why in ("well", "stopped") or (verdict.stuck is not None and verdict.stuck.at_exit):
        return False
    endings = [worker.ending for worker in verdict.culprits if worker.ending is not None]
    if any(ending.how == "exited" and ending.code == AGAIN for ending in endings):
        return False
    if any(ending.how == "raised" and _is_an_answer(ending.kind) for ending in endings):
        return False
    # `agreed` is also said of a run whose output nobody reads any longer, as with `head`
    return verdict.why != "agreed" or any(end.how == "raised" and end.kind != "BrokenPipeError" for end in endings)


def cause(verdict: Verdict) -> str:
    """What ended an attempt, in a few words; the report has told it in full."""
    if verdict.elsewhere is not None:
        return verdict.elsewhere.cause
    if verdict.stuck is not None and verdict.stuck.parting is not None:
        return "the ranks came to different collectives"
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
    """Whether it says that what is asked for cannot be, or that somebody pressed Ctrl-C."""
    found = getattr(errors, kind, None)
    refused = isinstance(found, type) and issubclass(found, (errors.AskedError, errors.Refused))
    return refused or kind == "KeyboardInterrupt"


def was_meant(verdict: Verdict, signals: Signals) -> bool:
    """Whether the workers died of a signal that this process was sent for them."""
    return any(worker.status == -number for worker in verdict.culprits for number in signals.for_scripts)


def _asked(signals: Signals, answered: int) -> signal.Signals | None:
    """What asks for an end. So does, while no script is there, a signal for it; the first ones were answered."""
    return next(iter([*signals.stops, *signals.for_scripts[answered:]]), None)


def _pause(seconds: float, signals: Signals, answered: int) -> signal.Signals | None:
    """Wait; what asked for an end meanwhile."""
    deadline = time.monotonic() + seconds
    while (asked := _asked(signals, answered)) is None and (left := deadline - time.monotonic()) > 0:
        select.select([signals.fd], [], [], left)
        signals.read()
    return asked


def _stopped(asked: signal.Signals, tell: Callable[[str], None]) -> int:
    """A request to end that came between two attempts, or while one was ended."""
    tell(f"duoka: {'interrupted' if asked is signal.SIGINT else 'stopped'}\n")
    return 128 + asked
