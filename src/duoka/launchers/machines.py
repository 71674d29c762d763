"""The other machines of a run: what their commands exchange, and whose verdict counts.

Each command watches its own workers and judges how they ended. The others send it the progress of their ranks, a
notice when they end their ranks, and the result. Machine 0 also receives samples of their ranks for `duoka watch`.
`joining.py` makes the connections, and `duoka.network.connection` has the channel that they form.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from duoka.errors import TimedOut
from duoka.launchers.restarts import cause, is_fault, was_meant
from duoka.launchers.verdict import Doubt, MachineResult, Verdict, agreement_key, doubt_of, without_agreement
from duoka.launchers.workers import WorkerGroup
from duoka.network.connection import FOR_FIRST, Channel, Message
from duoka.network.keys import Key
from duoka.planning.options import ONE_MACHINE, Machines
from duoka.supervision.rings import MachineSamples
from duoka.supervision.status_board import RankProgress, StatusBoard
from duoka.system.messages import printable
from duoka.watching.record import PublishedRun
from duoka.watching.sample import as_message, checked

TICK = 0.5  # seconds between two polls
TO_CONCLUDE = 60.0  # seconds for the others to end their ranks: longer than scripts have to answer a signal


class OtherMachines:
    """The other machines of a run, if it has any: without them, this one alone receives what it sends."""

    def __init__(
        self,
        channel: Channel | None = None,
        key: Key | None = None,  # of the run, inherited by its workers
        gloo: str | None = "lo",  # the network interface for gloo; None: gloo chooses
        machines: Machines = ONE_MACHINE,
        timeout: float = 0.0,  # seconds to wait for machine 0
    ) -> None:
        self.channel, self.key, self.gloo = channel or Channel(0, {}), key or Key(secrets.token_bytes(32)), gloo
        self._machines, self._timeout = machines, timeout
        self.begin(0)

    def begin(self, number: int) -> None:
        """Start an attempt."""
        self._attempt = number
        self._shown_at = self._answered_at = 0.0
        self._received_at: dict[int, float] = {}
        self._has_announced_end = False

    def _send(self, what: str, value: Any) -> None:
        # A machine may still receive messages of the attempt before, or already some of the next.
        self.channel.send(f"{what} {self._attempt}", value)

    def _received(self, what: str) -> Mapping[int, Message]:
        return self.channel.messages(f"{what} {self._attempt}")

    def start(self, group: WorkerGroup, port: int) -> None:
        """Let the workers start. port: of the store, on machine 0."""
        if self.channel.number == 0:
            self._send("port", port)

        def is_ready() -> bool:
            is_ending = self.announced_end() is not None or group.signals.stops or group.failed()
            return bool(self._received("port") or is_ending)

        was_ready = group.wait(is_ready, self._timeout)
        if ports := self._received("port"):
            group.go(ports[0].value)
        elif not was_ready:
            me, host = self._machines.called(self.channel.number), self._machines.called(0)
            raise TimedOut(f"{me} gave up waiting for {host}: {self._timeout:g} s")

    # Progress.

    def show(self, board: StatusBoard, seconds: float = 0.0, debugged: bool = False, last: bool = False) -> None:
        """Send the progress of this machine's ranks, if the last message is older than `seconds`.

        debugged: one of them is in a debugger. last: they will make no more progress.
        """
        now = time.monotonic()
        if now - self._shown_at >= seconds:
            self._shown_at = now
            seats = {rank: serialised(board.read(rank)) for rank in board.ranks}
            self._send("progress", {"seats": seats, "debugged": debugged, "last": last})

    def all_sent_last_progress(self) -> bool:
        """Return whether all other machines have sent the last progress of their ranks, or are lost."""
        shown = (machine for machine, message in self._received("progress").items() if message.value["last"])
        return len({*shown, *self.channel.lost, self.channel.number}) == self._machines.count

    def progress(self) -> dict[int, RankProgress]:
        """Return the progress of the other machines' ranks, by rank."""
        return {
            int(rank): progress_of(values, message.at)
            for machine, message in self._received("progress").items()
            if machine != self.channel.number
            for rank, values in message.value["seats"].items()
        }

    def share_samples(self, run: PublishedRun, board: StatusBoard) -> None:
        """Write samples of the other machines' ranks on machine 0's board, for `duoka watch` and reports there.

        The others answer each progress message of machine 0. So none are sent to a command that does not read.
        """
        if self.channel.number == 0:
            for machine, message in self.channel.messages(f"{FOR_FIRST}samples {self._attempt}").items():
                if message.at != self._received_at.get(machine):
                    self._received_at[machine] = message.at
                    with suppress(ValueError):  # without samples it is shown as silent
                        ranks = checked(message.value, self._machines.workers[machine])
                        board.remote_samples.write(machine, MachineSamples(message.at, ranks))
        elif 0 in (shown := self._received("progress")) and shown[0].at != self._answered_at:
            self._answered_at = shown[0].at
            if (sample := run.sample()) is not None:
                self.channel.send(f"{FOR_FIRST}samples {self._attempt}", as_message(sample.ranks))

    def is_debugging(self) -> bool:
        """Return whether a rank of any machine is in a debugger."""
        return any(message.value["debugged"] for message in self._received("progress").values())

    # The end.

    def announce_end(self, asked: signal.Signals | None = None) -> None:
        """Tell the other machines that this one ends its ranks."""
        if not self._has_announced_end:
            self._has_announced_end = True
            self._send("announce_end", int(asked or 0))

    def announced_end(self) -> int | None:
        """Return the signal for which another machine ends its ranks; 0: it ends them otherwise, or is lost.

        None: all machines go on.
        """
        for machine, message in self._received("announce_end").items():
            if machine != self.channel.number:
                return int(message.value)
        concluded = self._received("verdict")
        return 0 if any(machine not in concluded for machine in self.channel.lost) else None

    def conclude(self, verdict: Verdict, group: WorkerGroup) -> Verdict:
        """Return the verdict on the whole run, given that on this machine's ranks.

        Wait for the results of the others: without limit while all goes well, else for 60 s.
        """
        result = result_of(verdict, group)
        self._send("verdict", asdict(result))
        deadline, lost = None, self.channel.lost
        # Without machine 0, which passes messages on, no more results can come.
        while 0 not in lost and len({*self._received("verdict"), *lost}) < self._machines.count:
            if group.signals.stops:
                self.announce_end(group.signals.stops[0])
            if deadline is None and (self._has_announced_end or self.announced_end() is not None):
                deadline = time.monotonic() + TO_CONCLUDE
            if (deadline is not None and time.monotonic() > deadline) or group.signals.interrupts > 1:
                break  # those without a result count as gone
            group.listen(TICK)
        results = {machine: MachineResult(**message.value) for machine, message in self._received("verdict").items()}
        results = {machine: replace(other, cause=printable(other.cause)) for machine, other in results.items()}
        return self._concluded(verdict, results | {self.channel.number: result})

    def _concluded(self, verdict: Verdict, results: Mapping[int, MachineResult]) -> Verdict:
        machines = self._machines
        silent = [machine for machine in range(machines.count) if machine not in results]
        saved = max((result.saved for result in results.values() if result.saved is not None), default=None)
        if any(result.why == "stopped" for result in results.values()):
            # 143, of a machine whose ranks had to be killed, counts more than 75, of one that has saved. The loss of
            # the connection to ranks that have ended may come before the signal: it is no answer to that.
            answers = [result.code for result in results.values() if result.doubt != Doubt.FOLLOWS]
            code = max(answers or [result.code for result in results.values()])
            return replace(verdict, why="stopped", code=code)
        # All machines have the same results in the same order, and so choose the same.
        chosen, agreed = choose(results, silent), agree(results, silent)
        ended_well = [machine for machine, result in results.items() if result.why == "well"]
        result = None if chosen is None else results.get(chosen)
        # No machine has observed a cause, and ranks of one have ended: the others waited for them.
        if result is not None and result.doubt >= Doubt.FOLLOWS and ended_well:
            words = f"the scripts of {machines.called(ended_well[0])} ended while other ranks went on"
            result = replace(result, code=1, cause=words, fault=True)
        elif agreed or chosen is None or chosen == self.channel.number:
            return replace(verdict if agreed else without_agreement(verdict), saved=saved)
        elif result is not None:
            result = replace(result, cause=f"{result.cause} (on {machines.where(chosen)})")
        else:
            why = self.channel.lost.get(chosen, "it did not report how its ranks ended")
            result = MachineResult("gone", 1, f"{machines.called(chosen)} is gone: {why}")
        ended = {worker.rank: worker for worker in (*verdict.culprits, *verdict.others) if worker.failed}
        return Verdict("elsewhere", result.code, others=tuple(ended.values()), saved=saved, elsewhere=result)


def result_of(verdict: Verdict, group: WorkerGroup) -> MachineResult:
    """Summarise how this machine's ranks ended, to be sent to the other machines."""
    alone = without_agreement(verdict)
    is_cause = alone.why not in ("well", "stopped", "elsewhere")
    fault = is_cause and is_fault(alone) and not was_meant(alone, group.signals)
    words = cause(alone) if is_cause else "its ranks were ended"
    doubt, way = int(doubt_of(alone)), agreement_key(verdict)
    return MachineResult(verdict.why, verdict.code, words, doubt, way, fault, verdict.saved)


def choose(results: Mapping[int, MachineResult], silent: Sequence[int]) -> int | None:
    """Return the machine that ended the run: the first with the least doubt; None if all ended well.

    results: results, in the order in which all machines received them. silent: machines without a result.
    """
    doubts = {machine: result.doubt for machine, result in results.items() if result.why != "well"}
    doubts |= dict.fromkeys(silent, int(Doubt.GONE))
    return min(doubts, key=doubts.__getitem__, default=None)


def agree(results: Mapping[int, MachineResult], silent: Sequence[int]) -> bool:
    """Return whether the ranks of all machines ended in the same way."""
    return not silent and len({each.way if each.why == "agreed" else each.why for each in results.values()}) == 1


def serialised(progress: RankProgress) -> list[Any]:
    """Return the progress of a rank as JSON can hold it, with spans of time: the machines' clocks differ."""
    waited = progress.seen - progress.since if progress.waiting else 0.0
    return [progress.begun, progress.finished, progress.number, progress.text, waited, progress.steps]


def progress_of(values: Sequence[Any], received_at: float) -> RankProgress:
    """Return the progress of a rank of another machine."""
    begun, finished, number, text, waited, steps = values
    return RankProgress(begun, finished, number, printable(text), received_at - waited, received_at, steps, 0.0)
