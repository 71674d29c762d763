"""Find out why a run ended, and its exit code, from how each worker ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from duoka.launchers.hangs import Stuck
from duoka.launchers.worker import UNWRITTEN
from duoka.launchers.workers import Worker
from duoka.private.texts import TOO_LATE, says

Why = Literal["well", "agreed", "raised", "exited", "died", "left", "stuck", "stopped", "elsewhere"]


class Doubt(IntEnum):
    """The doubt whether a machine has observed the cause of a run's end; the least first."""

    NONE = 0
    GONE = 1  # a machine does not answer
    LEFT = 2  # ranks had ended well; an error on another machine may be the cause
    FOLLOWS = 3  # ranks lost the connection to others, or waited for them
    NOTHING = 4  # its ranks were ended by a signal or by another machine


@dataclass(frozen=True, slots=True)
class MachineResult:
    """The end of a machine's ranks, as sent to the others."""

    why: str  # why, code, saved: of its verdict
    code: int
    cause: str  # what ended them, in a few words
    doubt: int = 0  # a `Doubt`
    way: str | None = None  # equal on machines whose ranks all ended in the same way; None: ranks of this one did not
    fault: bool = False  # the run may be restarted after it
    saved: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a run ended.

    why: `well`; `agreed`: all scripts ended badly in the same way; `stopped`: by a signal to the command process;
    `elsewhere`: because of another machine; else what the ranks `culprits` did before the others were ended. Those of
    `stopped` are all ranks but those whose error only reports the end of another.
    """

    why: Why
    code: int  # the exit code
    culprits: tuple[Worker, ...] = ()
    others: tuple[Worker, ...] = ()  # that ended badly for another reason, mostly as the culprits were missing
    stuck: Stuck | None = None
    saved: int | None = None  # the step of the newest checkpoint
    rows: tuple[int, ...] = ()  # of each rank of this machine, of the largest batch; 0 before the first batch
    elsewhere: MachineResult | None = None  # of the machine that ended the run

    @property
    def ranks(self) -> list[int]:
        """The culprits' ranks."""
        return [worker.rank for worker in self.culprits]


def judge(workers: Sequence[Worker], stuck: Stuck | None, stopped_by: signal.Signals | None) -> Verdict:
    """Find the first error that is no consequence of another.

    An error that only reports the end of another rank counts if there is no other error.
    """
    if stopped_by is not None:
        ended = tuple(worker for worker in workers if worker.failed)
        answers = tuple(worker for worker in workers if not is_consequence(worker))
        return Verdict("stopped", _code_when_stopped(answers, stopped_by), answers, ended)
    failed = [worker for worker in workers if worker.failed]
    failed.sort(key=lambda worker: worker.bad_ending.time if worker.bad_ending is not None else worker.ended_at)
    if stuck is None and agreed(workers):
        return Verdict("agreed", _code(workers[0]), culprits=tuple(workers))
    # Where ranks wait, a library's abort is its answer to that, too; elsewhere it is an error of its own.
    follows = is_consequence if stuck is None else lambda worker: is_consequence(worker) or is_abort(worker)
    if real := [worker for worker in failed if not follows(worker)]:
        if _has_no_reader(real[0]):
            return Verdict("agreed", _code(real[0]), culprits=(real[0],))
        return _verdict(real[0], real, failed)
    if stuck is not None:
        at_end = stuck.mismatch.at_end if stuck.mismatch else ()
        early = tuple(worker for worker in workers if worker.rank in at_end)
        return Verdict("left" if early else "stuck", 1, early, tuple(failed), stuck)
    if not failed and not any(worker.was_signalled for worker in workers):
        return Verdict("well", 0)
    # All errors follow from the end of another rank: of one whose script has ended well, if there is one.
    if left := [worker for worker in workers if worker.succeeded and not worker.failed]:
        return Verdict("left", 1, culprits=tuple(left), others=tuple(failed))
    return _verdict(failed[0], failed, failed) if failed else Verdict("elsewhere", 1)


def without_agreement(verdict: Verdict) -> Verdict:
    """Return the verdict, changed for ranks of other machines that did not end in the same way."""
    if verdict.why != "agreed" or _has_no_reader(verdict.culprits[0]):
        return verdict
    raised = any(worker.ending is not None and worker.ending.how == "raised" for worker in verdict.culprits)
    return replace(verdict, why="raised" if raised else "exited")


def agreement_key(verdict: Verdict) -> str | None:
    """Return a text that is equal for machines whose ranks all ended in the same way; None if they did not."""
    ending = verdict.culprits[0].ending if verdict.why == "agreed" else None
    return None if ending is None else json.dumps([ending.how, ending.code, ending.said, ending.error])


def doubt_of(verdict: Verdict) -> Doubt:
    """Return the doubt whether this machine has observed the cause of the run's end."""
    if verdict.why == "stopped" and not verdict.culprits:
        return Doubt.FOLLOWS
    if verdict.why in ("stopped", "elsewhere"):
        return Doubt.NOTHING
    if verdict.why == "left":
        return Doubt.LEFT
    stuck = verdict.stuck
    waited = stuck is not None and not (stuck.culprits or stuck.mismatch or stuck.within or stuck.at_exit)
    follows = waited or any(is_consequence(worker) for worker in verdict.culprits)
    return Doubt.FOLLOWS if follows else Doubt.NONE


def agreed(workers: Sequence[Worker]) -> bool:
    """Return whether all scripts ended badly in the same way, so that the script and not a rank is the cause."""
    ends = [worker.ending for worker in workers]
    ways = {(end.how, end.code, end.said, end.trace, end.consequence) if end else None for end in ends}
    first = ends[0]
    return first is not None and first.code != 0 and not first.consequence and len(ways) == 1


def _verdict(first: Worker, same: Sequence[Worker], failed: Sequence[Worker]) -> Verdict:
    culprits = [worker for worker in same if _way(worker) == _way(first)]
    others = tuple(worker for worker in failed if worker not in culprits)
    why: Why = "died"
    if first.bad_ending is not None:
        why = "raised" if first.bad_ending.how == "raised" else "exited"
    elif first.status is not None and first.status > 0:
        why = "exited"
    return Verdict(why, _code(first), tuple(culprits), others)


def _way(worker: Worker) -> object:
    end = worker.bad_ending
    return worker.status if end is None else (end.how, end.code, end.trace)


def is_consequence(worker: Worker) -> bool:
    """Return whether its error only reports that another rank ended, did not join, or called another collective."""
    return worker.ending is not None and worker.ending.consequence


def was_too_late(worker: Worker) -> bool:
    """Return whether its error reports that another rank did not join in time."""
    ending = worker.ending
    return ending is not None and ending.consequence and (ending.kind == "TimedOut" or says(ending.error, *TOO_LATE))


def is_abort(worker: Worker) -> bool:
    """Return whether a library aborted it.

    Gloo does if a process receives more or fewer bytes than it expects, and those of GPUs at their time limit.
    """
    return worker.ending is None and worker.status == -signal.SIGABRT


def _has_no_reader(worker: Worker) -> bool:
    """Return whether it ended because the reader of its output, such as `head`, closed the pipe."""
    ending = worker.ending
    in_the_script = ending is not None and ending.kind == "BrokenPipeError"
    return not worker.own_log and (in_the_script or worker.status == UNWRITTEN)


def _code(worker: Worker) -> int:
    """Return a worker's exit code; 128 plus the signal's number, if a signal ended it."""
    if worker.status is None or worker.was_signalled:  # signalled after its script had ended
        return worker.ending.code if worker.ending else 1
    return 128 - worker.status if worker.status < 0 else worker.status


def _code_when_stopped(workers: Sequence[Worker], stopped_by: signal.Signals) -> int:
    """Return the scripts' exit code if all ended by themselves with the same one; else that of the signal.

    workers: without those whose error only reports that another rank ended.
    """
    by_themselves = [worker.ending for worker in workers if worker.status is not None and worker.status >= 0]
    codes = {end.code if end and end.how != "raised" else None for end in by_themselves}
    if len(by_themselves) == len(workers) and len(codes) == 1 and None not in codes:  # without workers: no code
        return codes.pop() or 0
    return 128 + stopped_by
