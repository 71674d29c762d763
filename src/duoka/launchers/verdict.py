"""Why a run ended, and with which exit code: told from how each worker ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from duoka.launchers.crew import Worker
from duoka.launchers.stuck import Stuck
from duoka.worker import UNWRITTEN

Why = Literal["well", "agreed", "raised", "exited", "died", "left", "stuck", "stopped", "elsewhere"]


class Doubt(IntEnum):
    """Whether what was seen on one machine ended the run, the surest first."""

    NONE = 0
    GONE = 1  # a machine does not answer, and so nobody knows
    LEFT = 2  # ranks had ended well; somebody who raised on another machine was the cause
    FOLLOWS = 3  # ranks lost others, or waited for them
    NOTHING = 4  # it was told to end its ranks


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What another machine tells of the end. cause: in words. fault: whether the run may begin again after it."""

    cause: str
    fault: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ended a run.

    why: `well`; `agreed`: the script itself ended so, whatever the rank; else what the ranks `culprits` did
        before the others were ended; `stopped`: a signal to the command process; `elsewhere`: on this machine
        nothing but what followed from it.
    code: the exit code. others: those that ended badly for another reason, mostly for want of the culprits.
    saved: the step of the newest checkpoint; None where there is none.
    """

    why: Why
    code: int
    culprits: tuple[Worker, ...] = ()
    others: tuple[Worker, ...] = ()
    stuck: Stuck | None = None
    saved: int | None = None
    elsewhere: Elsewhere | None = None


def judge(workers: Sequence[Worker], stuck: Stuck | None, stopped_by: signal.Signals | None) -> Verdict:
    """Find the first real error among what happened.

    An error that says no more than that another rank went away is not one, unless there is nothing else.
    """
    if stopped_by is not None:
        ended = tuple(worker for worker in workers if worker.failed)
        return Verdict("stopped", _code_when_stopped(workers, stopped_by), others=ended)
    failed = sorted((worker for worker in workers if worker.failed), key=_when)
    if stuck is None and agreed(workers):
        return Verdict("agreed", _code(workers[0]), culprits=tuple(workers))
    parted = stuck is not None and stuck.parting is not None
    if real := [worker for worker in failed if not is_consequence(worker) and not (parted and is_gloos(worker))]:
        if _has_no_reader(real[0]):
            return Verdict("agreed", _code(real[0]), culprits=(real[0],))
        return _verdict(real[0], real, failed)
    if stuck is not None:
        at_end = stuck.parting.at_end if stuck.parting else ()
        early = tuple(worker for worker in workers if worker.rank in at_end)
        return Verdict("left" if early else "stuck", 1, early, tuple(failed), stuck)
    if not failed and not any(worker.told_to_end for worker in workers):
        return Verdict("well", 0)
    if left := [worker for worker in workers if worker.left and not worker.failed]:
        return Verdict("left", 1, culprits=tuple(left), others=tuple(failed))
    return _verdict(failed[0], failed, failed) if failed else Verdict("elsewhere", 1)


def apart(verdict: Verdict) -> Verdict:
    """The same, where ranks of other machines did not end in the way in which those of this one did."""
    if verdict.why != "agreed" or _has_no_reader(verdict.culprits[0]):
        return verdict
    raised = any(worker.ending is not None and worker.ending.how == "raised" for worker in verdict.culprits)
    return replace(verdict, why="raised" if raised else "exited")


def way_of(verdict: Verdict) -> str | None:
    """Equal for machines on which all ranks ended in the same way of their own; None where they did not."""
    ending = verdict.culprits[0].ending if verdict.why == "agreed" else None
    return None if ending is None else json.dumps([ending.how, ending.code, ending.said, ending.error])


def doubt_of(verdict: Verdict) -> Doubt:
    """Whether what was seen on this machine ended the run."""
    if verdict.why in ("stopped", "elsewhere"):
        return Doubt.NOTHING
    if verdict.why == "left":
        return Doubt.LEFT
    stuck = verdict.stuck
    waited = stuck is not None and not (stuck.culprits or stuck.parting or stuck.within or stuck.at_exit)
    follows = waited or any(is_consequence(worker) for worker in verdict.culprits)
    return Doubt.FOLLOWS if follows else Doubt.NONE


def agreed(workers: Sequence[Worker]) -> bool:
    """Whether all scripts ended badly in the very same way of their own: it is the script's, not a rank's."""
    ends = [worker.ending for worker in workers]
    ways = {(end.how, end.code, end.said, end.trace, end.consequence) if end else None for end in ends}
    first = ends[0]
    return first is not None and first.code != 0 and not first.consequence and len(ways) == 1


def _verdict(first: Worker, same: Sequence[Worker], failed: Sequence[Worker]) -> Verdict:
    culprits = [worker for worker in same if _way(worker) == _way(first)]
    others = tuple(worker for worker in failed if worker not in culprits)
    why: Why = "died"
    if first.ending is not None and first.ending.code != 0:
        why = "raised" if first.ending.how == "raised" else "exited"
    elif first.status is not None and first.status > 0:
        why = "exited"
    return Verdict(why, _code(first), tuple(culprits), others)


def _way(worker: Worker) -> object:
    if worker.ending is not None and worker.ending.code != 0:
        return worker.ending.how, worker.ending.code, worker.ending.trace
    return worker.status


def _when(worker: Worker) -> float:
    if worker.ending is not None and worker.ending.code != 0:
        return worker.ending.time
    return worker.gone_at


def is_consequence(worker: Worker) -> bool:
    """Whether it only says that another rank went away, did not come, or came to something else."""
    return worker.ending is not None and worker.ending.consequence


def is_gloos(worker: Worker) -> bool:
    """Whether it ended as gloo ends a process to which another rank sends more or less than it expects."""
    return worker.ending is None and worker.status == -signal.SIGABRT


def _has_no_reader(worker: Worker) -> bool:
    """Whether it ended because whoever read its output had enough, as `head` has: no rank went wrong."""
    ending = worker.ending
    in_the_script = ending is not None and ending.kind == "BrokenPipeError"
    return not worker.own_log and (in_the_script or worker.status == UNWRITTEN)


def _code(worker: Worker) -> int:
    """A worker's exit code; 128 and the signal's number, where a signal ended it."""
    if worker.status is None or worker.told_to_end:  # its script had ended by itself, and then it was hurried
        return worker.ending.code if worker.ending else 1
    return 128 - worker.status if worker.status < 0 else worker.status


def _code_when_stopped(workers: Sequence[Worker], stopped_by: signal.Signals) -> int:
    """The scripts' own exit code, if they answered the signal and ended by themselves; else the signal's."""
    by_themselves = [worker.ending for worker in workers if worker.status is not None and worker.status >= 0]
    codes = {end.code if end and end.how != "raised" else None for end in by_themselves}
    if len(by_themselves) == len(workers) and len(codes) == 1 and None not in codes:
        return codes.pop() or 0
    return 128 + stopped_by
