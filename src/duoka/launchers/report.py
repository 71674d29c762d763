"""Report a run that ended badly: its first error, once, and the place of the logs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from duoka.launchers import signals, stacks
from duoka.launchers.hints import hints
from duoka.launchers.output import Outputs
from duoka.launchers.parting import parting
from duoka.launchers.remaining import ratio, with_fewer_rows
from duoka.launchers.stuck import Stuck, read_stacks
from duoka.launchers.verdict import Verdict
from duoka.launchers.worker_group import Worker
from duoka.plan import Plan
from duoka.supervision.status_board import AT_END, CollectiveMismatch, StatusBoard, name_ranks

LOG_LINES = 5  # of a dead rank's log
MOST_STACKS = 16  # of ranks that wait


@dataclass(frozen=True, slots=True)
class ReportContext:
    """The plan, status board, workers and log files of an attempt."""

    plan: Plan
    board: StatusBoard
    workers: Sequence[Worker]
    outputs: Outputs

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return sum(self.plan.machines.workers) or len(self.workers)

    @property
    def verbose(self) -> bool:
        """Return whether --verbose was given."""
        return self.plan.verbosity == "verbose"


def report(verdict: Verdict, scene: ReportContext) -> str:
    """Return the lines for standard error about the end of a run; empty if it ended well."""
    lines = REPORTS[verdict.why](verdict, scene)
    lines += _others_in_full(verdict, scene) if scene.verbose else _others(verdict)
    return "".join(f"{line}\n" for line in lines)


def _well(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report functions that raised at exit on ranks whose output is in log files; Python prints and ignores those."""
    said: dict[str, list[int]] = {}
    for worker in scene.workers:
        if worker.afterwards:
            said.setdefault(worker.afterwards, []).append(worker.rank)
    if any(0 in ranks and len(said) == 1 for ranks in said.values()) or not scene.outputs.has_any():
        return []  # rank 0 has printed it
    return [
        line
        for trace, ranks in said.items()
        for line in (*trace.splitlines(), f"duoka: raised at exit on {_ranks_of(ranks, scene)} ({_host()})")
    ]


def _agreed(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report the error as Python would: it is the script's, and the same on all ranks."""
    first = verdict.culprits[0]
    return [*_last_words(first, scene), *_hints(verdict, scene)]


def _raised(verdict: Verdict, scene: ReportContext) -> list[str]:
    first, ending = verdict.culprits[0], verdict.culprits[0].ending
    assert ending is not None
    what = f"raised on {_of_all(verdict, scene)} ({ending.host}){_place(first, scene)}"
    return [*_last_words(first, scene), _headline(what, verdict, scene), *_hints(verdict, scene)]


def _hints(verdict: Verdict, scene: ReportContext) -> list[str]:
    plan, ending = scene.plan, verdict.culprits[0].ending
    is_uneven = plan.weights or plan.measures_rows
    return hints(ending.error if ending else "", plan, ratio(with_fewer_rows(plan, verdict)) if is_uneven else "")


def _exited(verdict: Verdict, scene: ReportContext) -> list[str]:
    first = verdict.culprits[0]
    how = ""
    if first.ending is None:
        how = " without ending python, as by os._exit"
    elif first.ending.code == 0:
        how = " after its script had ended"
    who, where = _of_all(verdict, scene), _place(first, scene)
    what = f"{who} exited with code {verdict.code}{how} ({_host()}){where}"
    return [*_last_words(first, scene), _headline(what, verdict, scene), *_log(first, scene)]


def _died(verdict: Verdict, scene: ReportContext) -> list[str]:
    first = verdict.culprits[0]
    assert first.status is not None
    number = -first.status
    hint = ", sent by somebody or by the kernel when memory ran out" if number == signal.SIGKILL else ""
    after = " after its script had ended" if first.ending is not None else ""
    what = f"{_of_all(verdict, scene)} ended by {signals.name(number)}{hint}{after} ({_host()}){_place(first, scene)}"
    return [_headline(what, verdict, scene), *_crash(first), *_log(first, scene)]


def _left(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report ranks whose script ended while others went on."""
    first = verdict.culprits[0].rank
    board, ranks = scene.board, [worker.rank for worker in verdict.culprits]
    last = board.read(first).begun
    if board.remembers(first, last) and board.text(first, last).endswith(AT_END):
        last -= 1
    step = _step(first, scene)
    after = f"{step and ','} after {_collective(board, first, last)}" if last else ""
    others = [worker.rank for worker in scene.workers if worker.rank not in ranks]
    waited = [rank for rank in others if board.read(rank).number > last]
    went_on = f"{name_ranks(others)} went on"
    if waited:
        number = board.read(waited[0]).number
        went_on = f"{name_ranks(waited)} waited in {_collective(board, waited[0], number)}"
    what = f"{_ranks_of(ranks, scene)} ({_host()}) left{step}{after}: the script ended there, while {went_on}"
    return [_headline(what, verdict, scene), *_parting(verdict, scene)]


def _stuck(verdict: Verdict, scene: ReportContext) -> list[str]:
    stuck = verdict.stuck
    assert stuck is not None
    ranks = _to_show(stuck)
    if stuck.mismatch is not None:
        what = _mismatch(stuck.mismatch, scene)
    else:
        what = _not_exiting(stuck, scene) if stuck.at_exit else _waited(stuck, scene)
    ended = [worker.rank for worker in scene.workers if worker.ending is not None and not stuck.at_exit]
    here = [rank for rank in ranks if rank in scene.board.ranks and rank not in ended]
    stack_lines = (line for rank in here for line in _stack_lines(rank, stuck, scene))
    return [_headline(what, verdict, scene), *_parting(verdict, scene), *stack_lines]


def _to_show(stuck: Stuck) -> Sequence[int]:
    """Return the ranks whose stacks are printed: those that others wait for, if they are known."""
    if stuck.mismatch is not None:
        return stuck.mismatch.sides[0][0]
    return stuck.missing or (*stuck.waiting, *stuck.within)


def other_stacks(verdict: Verdict) -> str:
    """Return the stacks of a hang that `report` leaves to the log files: those of the ranks that wait."""
    stuck = verdict.stuck
    if stuck is None:
        return ""
    shown = _to_show(stuck)
    others = [rank for rank in sorted(stuck.stacks) if rank not in shown][:MOST_STACKS]
    lines = []
    for rank in others:
        lines += [
            f"  rank {rank} is at (innermost first):",
            *(f"  {it}" for it in stacks.excerpt(stuck.stacks[rank])),
        ]
    return "".join(f"{line}\n" for line in lines)


def _waited(stuck: Stuck, scene: ReportContext) -> str:
    """Return `rank 1 of 3 (host) has not joined all_reduce 12 at a.py:4; it is ...; rank 0 has waited for 31 s`."""
    collective = _collective(scene.board, stuck.waiting[0], stuck.number, stuck.text)
    others = [rank for rank in stuck.waiting if rank not in stuck.odd] or list(stuck.waiting)
    waiting = f"{name_ranks(others)} {'has' if len(others) == 1 else 'have'} waited"
    since = f"{waiting} for {stuck.seconds:.0f} s (the limit is {stuck.limit:g} s)"
    if stuck.within:
        return _blocked_in_torch(stuck, collective, scene)
    if not stuck.culprits:
        return f"{collective} did not end: {since}{_remote_missing(stuck, scene)}"
    missing, first = list(stuck.culprits), stuck.culprits[0]
    has = "has" if len(missing) == 1 else "have"
    if first in stuck.odd:
        state = stuck.odd[first] if len(missing) == 1 else stuck.odd[first].replace("is ", "are ", 1)
        where = f" and {has} not joined {collective}" if stuck.missing else f" in {collective}"
        return f"{_ranks_of(missing, scene)} ({_host()}){_step(first, scene)} {state}{where}; {since}"
    line = stacks.users_line(stuck.stacks.get(first, ""))
    asleep = ", asleep" if first in stuck.asleep else ""
    place = f"it is in {line}{asleep}; " if line and len(missing) == 1 else ""
    step = _step(first, scene)
    return f"{_ranks_of(missing, scene)} ({_host()}){step} {has} not joined {collective}; {place}{since}"


def _remote_missing(stuck: Stuck, scene: ReportContext) -> str:
    """Return `; rank 2 on machine 1 (node2) has not joined it`."""
    machines = scene.plan.machines
    there: dict[int, list[int]] = {}
    for rank in stuck.remote:
        there.setdefault(machines.of(rank), []).append(rank)
    who = [f"{name_ranks(ranks)} on {machines.where(number)}" for number, ranks in there.items()]
    return f"; {', '.join(who)} {'has' if len(stuck.remote) == 1 else 'have'} not joined it" if who else ""


def _not_exiting(stuck: Stuck, scene: ReportContext) -> str:
    """Report ranks that do not exit; their stacks show the threads that they wait for."""
    ranks, has = list(stuck.missing), "has" if len(stuck.missing) == 1 else "have"
    since = f"{stuck.seconds:.0f} s after the script ended (the limit is {stuck.limit:g} s)"
    return f"{_ranks_of(ranks, scene)} ({_host()}) {has} not exited {since}"


def _blocked_in_torch(stuck: Stuck, collective: str, scene: ReportContext) -> str:
    """Report ranks of which some wait in a collective and others somewhere in torch; the smaller side first."""
    line = stacks.users_line(stuck.stacks.get(stuck.within[0], "")) or "?"
    sides = sorted([(stuck.waiting, collective), (stuck.within, f"torch at {line}")], key=lambda side: len(side[0]))
    (ranks, where), (them, theirs) = sides
    who = f"{_ranks_of(list(ranks), scene)} ({_host()}){_step(ranks[0], scene)}"
    waited = f"for {stuck.seconds:.0f} s (the limit is {stuck.limit:g} s)"
    return f"the ranks wait in different places: {who} in {where}, {name_ranks(list(them))} in {theirs}, {waited}"


def _mismatch(mismatch: CollectiveMismatch, scene: ReportContext) -> str:
    """Report ranks that called different collectives; the smaller side, the likelier cause, first."""
    (ranks, text), *others = mismatch.sides
    theirs = ", ".join(f"{name_ranks(list(them))} called {what}" for them, what in others)
    step = _step(ranks[0], scene)
    who = f"{_ranks_of(list(ranks), scene)} ({_host()}){step}"
    return f"the ranks called different collectives (number {mismatch.number:,}): {who} called {text}, {theirs}"


def _parting(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Return by which line and values ranks came to call different collectives."""
    mismatch = verdict.stuck and verdict.stuck.mismatch
    frames = {worker.rank: worker.ending.frames for worker in scene.workers if worker.ending is not None}
    return parting(frames, [ranks for ranks, _ in mismatch.sides]) if mismatch else []


def _elsewhere(verdict: Verdict, scene: ReportContext) -> list[str]:
    cause = verdict.elsewhere.cause if verdict.elsewhere else "another machine ended the run"
    return [_headline(cause, verdict, scene)]


def _stopped(verdict: Verdict, scene: ReportContext) -> list[str]:
    killed = [worker.rank for worker in scene.workers if worker.was_signalled]
    forced = f"; {name_ranks(killed)} had to be ended by force" if killed else ""
    by = "interrupted" if verdict.code == 128 + signal.SIGINT else "stopped"
    return [f"duoka: {by}{forced}"]


REPORTS: dict[str, Callable[[Verdict, ReportContext], list[str]]] = {
    "agreed": _agreed,
    "died": _died,
    "elsewhere": _elsewhere,
    "exited": _exited,
    "left": _left,
    "raised": _raised,
    "stopped": _stopped,
    "stuck": _stuck,
    "well": _well,
}


# Parts of the report.


def _headline(what: str, verdict: Verdict, scene: ReportContext) -> str:
    """Return the cause, what happened to the other ranks, and the place of the logs."""
    rest = scene.world_size - len(verdict.culprits)
    ended = {0: "", 1: "; the other rank was ended"}.get(rest, "; the other ranks were ended")
    if verdict.why in ("stuck", "elsewhere"):
        ended = "; the run was ended"
    found = verdict.stuck.stacks if verdict.stuck else {}
    kept = scene.outputs.keep({f"rank{rank}.stacks": text for rank, text in found.items()})
    logs = f"; logs: {kept}" if kept else ""
    return f"duoka: {what}{ended}{logs}"


def _others(verdict: Verdict) -> list[str]:
    """Return one line for each way in which other ranks ended."""
    if verdict.stuck is not None or verdict.why == "stopped":
        return []  # they waited, or were asked to end: the headline reports it
    ranks: dict[str, list[int]] = {}
    for worker in sorted(verdict.others, key=lambda worker: worker.rank):
        ranks.setdefault(_summary(worker, verdict), []).append(worker.rank)
    return [f"  {name_ranks(those)}: {summary}" for summary, those in ranks.items()]


def _others_in_full(verdict: Verdict, scene: ReportContext) -> list[str]:
    return [
        line
        for worker in sorted(verdict.others, key=lambda worker: worker.rank)
        for line in (f"duoka: rank {worker.rank} ended with", *_last_words(worker, scene))
    ]


def _summary(worker: Worker, verdict: Verdict) -> str:
    ending = worker.ending
    if ending is None or ending.code == 0:
        status = worker.status or 0
        return f"ended by {signals.name(-status)}" if status < 0 else f"exit code {status}"
    if ending.consequence:
        to = f" to {name_ranks([one.rank for one in verdict.culprits])}" if verdict.culprits else ""
        return f"lost the connection{to} (--verbose shows it)"
    summary = ending.error.splitlines()[-1] if ending.error else f"exit code {ending.code}"
    return f"{summary} (--verbose shows it)"


def _last_words(worker: Worker, scene: ReportContext) -> list[str]:
    """Return the traceback or the message of sys.exit, as Python prints it."""
    ending = worker.ending
    if ending is None:
        return []
    if ending.how == "exited":
        return [ending.said] if ending.said else []
    if ending.shown and not scene.verbose:
        return []
    return (ending.full_trace if scene.verbose else ending.trace).splitlines()


def _crash(worker: Worker) -> list[str]:
    frames = stacks.excerpt(read_stacks(worker))
    return ["  it was at (innermost first):", *(f"  {frame}" for frame in frames)] if frames else []


def _log(worker: Worker, scene: ReportContext) -> list[str]:
    """Return the end of the log of a rank that died without a report."""
    if worker.ending is not None:
        return []
    lines = scene.outputs.tail(worker.rank, LOG_LINES)
    return [f"  the end of rank {worker.rank}'s log:", *(f"    {line}" for line in lines)] if lines else []


def _stack_lines(rank: int, stuck: Stuck, scene: ReportContext) -> Iterator[str]:
    finished = scene.board.read(rank).finished
    after = ""
    if finished and rank in stuck.missing:
        after = f" is after {_collective(scene.board, rank, finished)} and"
    frames = stacks.excerpt(stuck.stacks.get(rank, ""))
    if frames:
        yield f"  rank {rank}{after} is at (innermost first):"
        yield from (f"  {frame}" for frame in frames)
    elif not (stuck.at_exit and rank in stuck.stacks):
        state = stuck.odd.get(rank, "does not answer when it is asked for its stack")
        yield f"  rank {rank}{after} {state}"


def _of_all(verdict: Verdict, scene: ReportContext) -> str:
    return _ranks_of([worker.rank for worker in verdict.culprits], scene)


def _ranks_of(ranks: list[int], scene: ReportContext) -> str:
    return f"{name_ranks(ranks)} of {scene.world_size}"


def _place(worker: Worker, scene: ReportContext) -> str:
    """Return `, in step 6, after all_reduce 22 at train.py:41`."""
    progress, step = scene.board.read(worker.rank), _step(worker.rank, scene)
    parts = [step] if step else []
    if progress.waiting:
        parts.append(f" in {_collective(scene.board, worker.rank, progress.number)}")
    elif progress.finished:
        parts.append(f" after {_collective(scene.board, worker.rank, progress.finished)}")
    return "".join(f",{part}" for part in parts)


def _step(rank: int, scene: ReportContext) -> str:
    """Return ` in step 6`; empty if the status board has no step."""
    worker = next((worker for worker in scene.workers if worker.rank == rank), None)
    if worker is None:  # it is on another machine
        return ""
    progress = scene.board.read(rank)
    if worker.ending is not None and worker.ending.how == "returned":
        return f" after step {progress.steps:,}" if progress.steps else ""
    return f" in step {progress.steps + 1:,}" if progress.begun or progress.steps else ""


def _collective(board: StatusBoard, rank: int, number: int, text: str = "") -> str:
    """Return `all_reduce 1,205 at train.py:41`: operation, number and line of a collective.

    text: its name, in case the board has forgotten it.
    """
    text = board.text(rank, number) if board.remembers(rank, number) else text
    if not text:
        return f"collective {number:,}"
    words, at, place = text.rpartition(" at ")
    operation = (words or text).split(" ", 1)[0]
    return f"{operation} {number:,}{at}{place if at else ''}"


def _host() -> str:
    return socket.gethostname()
