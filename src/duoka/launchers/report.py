"""Report a run that ended badly: its first error, once, and where the logs are."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from duoka.hardware.inventory import read
from duoka.hardware.vendors import FAULTS
from duoka.launchers.divergence import divergence
from duoka.launchers.hangs import Stuck, read_stacks, script_frames, users_line
from duoka.launchers.hints import hints, lost_hints
from duoka.launchers.processes import Outputs, signal_name
from duoka.launchers.restarts import lost_devices, with_fewer_rows
from duoka.launchers.verdict import Verdict
from duoka.launchers.workers import Worker
from duoka.planning.plan import Plan, ratio
from duoka.supervision.status_board import AT_END, StatusBoard, name_ranks, ranks_by

LOG_LINES = 5  # of a dead rank's log
MOST_STACKS = 16  # of ranks that wait


@dataclass(frozen=True, slots=True)
class ReportContext:
    """The plan, status board, workers and log files of an attempt, and the words in which a report names them."""

    plan: Plan
    board: StatusBoard
    workers: Sequence[Worker]
    outputs: Outputs

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return sum(self.plan.machines.workers) or len(self.workers)

    def ranks(self, ranks: Sequence[int]) -> str:
        """Return `ranks 1 and 2 of 3 (host)`."""
        return f"{self.ranks_of_all(ranks)} ({socket.gethostname()})"

    def ranks_of_all(self, ranks: Sequence[int]) -> str:
        """Return `ranks 1 and 2 of 3`."""
        return f"{name_ranks(ranks)} of {self.world_size}"

    def collective(self, rank: int, number: int, text: str = "") -> str:
        """Return `all_reduce 1,205 at train.py:41`: operation, number and line of a collective.

        text: its name, in case the board has forgotten it.
        """
        text = self.board.text(rank, number) if self.board.remembers(rank, number) else text
        if not text:
            return f"collective {number:,}"
        words, at, line = text.rpartition(" at ")
        operation = (words or text).split(" ", 1)[0]
        return f"{operation} {number:,}{at}{line if at else ''}"

    def step(self, rank: int) -> str:
        """Return ` in step 6`; empty if the status board has no step."""
        worker = next((worker for worker in self.workers if worker.rank == rank), None)
        if worker is None:  # it is on another machine
            return ""
        progress = self.board.read(rank)
        if worker.ending is not None and worker.ending.how == "returned":
            return f" after step {progress.steps:,}" if progress.steps else ""
        return f" in step {progress.steps + 1:,}" if progress.begun or progress.steps else ""

    def progress(self, rank: int) -> str:
        """Return `, in step 6, after all_reduce 22 at train.py:41`."""
        progress = self.board.read(rank)
        parts = [self.step(rank)]
        if progress.waiting:
            parts.append(f" in {self.collective(rank, progress.number)}")
        elif progress.finished:
            parts.append(f" after {self.collective(rank, progress.finished)}")
        return "".join(f",{part}" for part in parts if part)


def report(verdict: Verdict, scene: ReportContext) -> str:
    """Return the lines for standard error about the end of a run; empty if it ended well."""
    lines = REPORTS[verdict.why](verdict, scene)
    others = sorted(verdict.others, key=lambda worker: worker.rank)
    if scene.plan.verbosity == "verbose":
        for worker in others:
            lines += [f"duoka: rank {worker.rank} ended with", *_last_words(worker, scene)]
    elif verdict.stuck is None and verdict.why != "stopped":  # else the headline reports how they ended
        ranks = ranks_by((worker.rank, _summary(worker, verdict)) for worker in others)
        lines += [f"  {name_ranks(group)}: {summary}" for summary, group in ranks.items()]
    return "".join(f"{line}\n" for line in lines)


# One function for each way in which a run ends.


def _well(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report functions that raised at exit on ranks whose output is in log files; Python prints and ignores those."""
    traces = ranks_by((worker.rank, worker.afterwards) for worker in scene.workers if worker.afterwards)
    if any(0 in ranks and len(traces) == 1 for ranks in traces.values()) or not scene.outputs.files:
        return []  # rank 0 has printed it, or each rank has
    return [
        line
        for trace, ranks in traces.items()
        for line in (*trace.splitlines(), f"duoka: raised at exit on {scene.ranks(ranks)}")
    ]


def _agreed(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report the error as Python would: it is the script's, and the same on all ranks."""
    return [*_last_words(verdict.culprits[0], scene), *_hints(verdict, scene)]


def _raised(verdict: Verdict, scene: ReportContext) -> list[str]:
    first = verdict.culprits[0]
    headline = _headline(f"raised on {scene.ranks(verdict.ranks)}{scene.progress(first.rank)}", verdict, scene)
    return [*_last_words(first, scene), headline, *_hints(verdict, scene)]


def _hints(verdict: Verdict, scene: ReportContext) -> list[str]:
    plan, ending = scene.plan, verdict.culprits[0].ending
    # The driver is asked only where a device may be the cause: it may take seconds to answer.
    may_be_lost = ending is None or ending.consequence or re.search(FAULTS, ending.error)
    lost = lost_devices(plan, verdict, read) if may_be_lost and plan.devices[0].type != "cpu" else {}
    if lost:
        return lost_hints(plan, {plan.devices[rank]: problem for rank, problem in lost.items()})
    fewer_rows = ratio(with_fewer_rows(plan, verdict)) if plan.weights or plan.measures_rows else ""
    return hints(ending.error, plan, ending.held, fewer_rows) if ending is not None else []


def _exited(verdict: Verdict, scene: ReportContext) -> list[str]:
    first, how = verdict.culprits[0], ""
    if first.ending is None:
        how = " without ending python, as by os._exit"
    elif first.ending.code == 0:
        how = " after its script had ended"
    who = scene.ranks_of_all(verdict.ranks)
    where = f"({socket.gethostname()}){scene.progress(first.rank)}"
    headline = _headline(f"{who} exited with code {verdict.code}{how} {where}", verdict, scene)
    return [*_last_words(first, scene), headline, *_log(first, scene)]


def _died(verdict: Verdict, scene: ReportContext) -> list[str]:
    first = verdict.culprits[0]
    assert first.status is not None
    how = signal_name(-first.status)
    if -first.status == signal.SIGKILL:
        how += ", sent by somebody or by the kernel when memory ran out"
    if first.ending is not None:
        how += " after its script had ended"
    who = scene.ranks_of_all(verdict.ranks)
    what = f"{who} ended by {how} ({socket.gethostname()}){scene.progress(first.rank)}"
    frames = [f"  {frame}" for frame in script_frames(read_stacks(first))]
    crash = ["  it was at (innermost first):", *frames] if frames else []
    return [_headline(what, verdict, scene), *crash, *_log(first, scene), *_hints(verdict, scene)]


def _left(verdict: Verdict, scene: ReportContext) -> list[str]:
    """Report ranks whose script ended while others went on."""
    board, ranks = scene.board, verdict.ranks
    last = board.read(ranks[0]).begun
    if board.remembers(ranks[0], last) and board.text(ranks[0], last).endswith(AT_END):
        last -= 1  # that one is duoka's, by which ranks agree on the end
    step = scene.step(ranks[0])
    after = f"{step and ','} after {scene.collective(ranks[0], last)}" if last else ""
    others = [worker.rank for worker in scene.workers if worker.rank not in ranks]
    went_on = f"{name_ranks(others)} went on"
    if waiting := [rank for rank in others if board.read(rank).number > last]:
        number = board.read(waiting[0]).number
        went_on = f"{name_ranks(waiting)} waited in {scene.collective(waiting[0], number)}"
    what = f"{scene.ranks(ranks)} left{step}{after}: the script ended there, while {went_on}"
    return [_headline(what, verdict, scene), *_divergence(verdict, scene)]


def _divergence(verdict: Verdict, scene: ReportContext) -> list[str]:
    mismatch = verdict.stuck and verdict.stuck.mismatch
    frames = {worker.rank: worker.ending.frames for worker in scene.workers if worker.ending is not None}
    return divergence(frames, [ranks for ranks, _ in mismatch.sides]) if mismatch else []


def _elsewhere(verdict: Verdict, scene: ReportContext) -> list[str]:
    cause = verdict.elsewhere.cause if verdict.elsewhere else "another machine ended the run"
    return [_headline(cause, verdict, scene)]


def _stopped(verdict: Verdict, scene: ReportContext) -> list[str]:
    killed = [worker.rank for worker in scene.workers if worker.was_signalled]
    forced = f"; {name_ranks(killed)} had to be ended by force" if killed else ""
    by = "interrupted" if verdict.code == 128 + signal.SIGINT else "stopped"
    return [f"duoka: {by}{forced}"]


def _stuck(verdict: Verdict, scene: ReportContext) -> list[str]:
    stuck = verdict.stuck
    assert stuck is not None
    if stuck.mismatch is not None:
        what = _mismatched(stuck, scene)
    elif stuck.at_exit:  # the stacks show the threads that the ranks wait for
        has = "has" if len(stuck.missing) == 1 else "have"
        since = f"{stuck.seconds:.0f} s after the script ended (the limit is {stuck.limit:g} s)"
        what = f"{scene.ranks(stuck.missing)} {has} not exited {since}"
    elif stuck.within:
        what = _blocked_in_torch(stuck, scene)
    else:
        what = _waited(stuck, scene)
    ended = [worker.rank for worker in scene.workers if worker.ending is not None and not stuck.at_exit]
    here = [rank for rank in _to_show(stuck) if rank in scene.board.ranks and rank not in ended]
    stack_lines = (line for rank in here for line in _stack_lines(rank, stuck, scene))
    return [_headline(what, verdict, scene), *_divergence(verdict, scene), *stack_lines]


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


# Hangs.


def _mismatched(stuck: Stuck, scene: ReportContext) -> str:
    """Report ranks that called different collectives; the smaller side, the likelier cause, first."""
    assert stuck.mismatch is not None
    (ranks, text), *others = stuck.mismatch.sides
    theirs = ", ".join(f"{name_ranks(them)} called {what}" for them, what in others)
    who = f"{scene.ranks(ranks)}{scene.step(ranks[0])}"
    return f"the ranks called different collectives (number {stuck.mismatch.number:,}): {who} called {text}, {theirs}"


def _waited(stuck: Stuck, scene: ReportContext) -> str:
    """Return `rank 1 of 3 (host) has not joined all_reduce 12 at a.py:4; it is ...; rank 0 has waited for 31 s`."""
    collective = scene.collective(stuck.waiting[0], stuck.number, stuck.text)
    others = [rank for rank in stuck.waiting if rank not in stuck.odd] or list(stuck.waiting)
    waiting = f"{name_ranks(others)} {'has' if len(others) == 1 else 'have'} waited"
    limit = f"the limit is {stuck.limit:g} s" if stuck.limit else "the script's own limit"
    since = f"{waiting} for {stuck.seconds:.0f} s ({limit})"
    if not stuck.culprits:
        return f"{collective} did not end: {since}{_missing_elsewhere(stuck, scene)}"
    missing, first = list(stuck.culprits), stuck.culprits[0]
    who, has = f"{scene.ranks(missing)}{scene.step(first)}", "has" if len(missing) == 1 else "have"
    if first in stuck.odd:
        state = stuck.odd[first] if len(missing) == 1 else stuck.odd[first].replace("is ", "are ", 1)
        where = f" and {has} not joined {collective}" if stuck.missing else f" in {collective}"
        return f"{who} {state}{where}; {since}"
    line = users_line(stuck.stacks.get(first, ""))
    asleep = ", asleep" if first in stuck.asleep else ""
    where = f"it is in {line}{asleep}; " if line and len(missing) == 1 else ""
    return f"{who} {has} not joined {collective}; {where}{since}"


def _missing_elsewhere(stuck: Stuck, scene: ReportContext) -> str:
    """Return `; rank 2 on machine 1 (node2) has not joined it`."""
    machines = scene.plan.machines
    by_machine = ranks_by((rank, machines.machine_of(rank)) for rank in stuck.remote)
    who = [f"{name_ranks(ranks)} on {machines.where(number)}" for number, ranks in by_machine.items()]
    return f"; {', '.join(who)} {'has' if len(stuck.remote) == 1 else 'have'} not joined it" if who else ""


def _blocked_in_torch(stuck: Stuck, scene: ReportContext) -> str:
    """Report ranks of which some wait in a collective and others somewhere in torch; the smaller side first."""
    collective = scene.collective(stuck.waiting[0], stuck.number, stuck.text)
    line = users_line(stuck.stacks.get(stuck.within[0], "")) or "?"
    sides = sorted([(stuck.waiting, collective), (stuck.within, f"torch at {line}")], key=lambda side: len(side[0]))
    (ranks, where), (them, theirs) = sides
    waited = f"for {stuck.seconds:.0f} s (the limit is {stuck.limit:g} s)"
    mine = f"{scene.ranks(ranks)}{scene.step(ranks[0])} in {where}"
    return f"the ranks wait in different places: {mine}, {name_ranks(them)} in {theirs}, {waited}"


def _to_show(stuck: Stuck) -> Sequence[int]:
    """Return the ranks whose stacks are printed: those that others wait for, if they are known."""
    if stuck.mismatch is not None:
        return stuck.mismatch.sides[0][0]
    return stuck.missing or (*stuck.waiting, *stuck.within)


def _stack_lines(rank: int, stuck: Stuck, scene: ReportContext) -> Iterator[str]:
    finished = scene.board.read(rank).finished
    after = ""
    if finished and rank in stuck.missing:
        after = f" is after {scene.collective(rank, finished)} and"
    frames = script_frames(stuck.stacks.get(rank, ""))
    if frames:
        yield f"  rank {rank}{after} is at (innermost first):"
        yield from (f"  {frame}" for frame in frames)
    elif not (stuck.at_exit and rank in stuck.stacks):
        state = stuck.odd.get(rank, "does not answer when it is asked for its stack")
        yield f"  rank {rank}{after} {state}"


def other_stacks(verdict: Verdict) -> str:
    """Return the stacks of a hang that `report` leaves to the log files: those of the ranks that wait."""
    stuck = verdict.stuck
    if stuck is None:
        return ""
    shown = _to_show(stuck)
    lines = []
    for rank in [rank for rank in sorted(stuck.stacks) if rank not in shown][:MOST_STACKS]:
        frames = [f"  {frame}\n" for frame in script_frames(stuck.stacks[rank])]
        lines += [f"  rank {rank} is at (innermost first):\n", *frames]
    return "".join(lines)


# Parts of a report.


def _headline(what: str, verdict: Verdict, scene: ReportContext) -> str:
    """Return the cause, what happened to the other ranks, and where the logs are."""
    rest = scene.world_size - len(verdict.culprits)
    ended = {0: "", 1: "; the other rank was ended"}.get(rest, "; the other ranks were ended")
    if verdict.why in ("stuck", "elsewhere"):
        ended = "; the run was ended"
    stacks = verdict.stuck.stacks if verdict.stuck else {}
    folder = scene.outputs.keep({f"rank{rank}.stacks": text for rank, text in stacks.items()})
    return f"duoka: {what}{ended}{f'; logs: {folder}' if folder else ''}"


def _summary(worker: Worker, verdict: Verdict) -> str:
    """Return how another rank ended, in one line."""
    ending = worker.bad_ending
    if ending is None:
        status = worker.status or 0
        return f"ended by {signal_name(-status)}" if status < 0 else f"exit code {status}"
    if ending.consequence:
        to = f" to {name_ranks(verdict.ranks)}" if verdict.culprits else ""
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
    if scene.plan.verbosity == "verbose":
        return ending.full_trace.splitlines()
    return [] if ending.shown else ending.trace.splitlines()


def _log(worker: Worker, scene: ReportContext) -> list[str]:
    """Return the end of the log of a rank that died without a report."""
    lines = scene.outputs.tail(worker.rank, LOG_LINES) if worker.ending is None else []
    return [f"  the end of rank {worker.rank}'s log:", *(f"    {line}" for line in lines)] if lines else []
