"""The other machines of a run: what their commands exchange.

Each command watches its own workers and judges how they ended. The others send it the progress of their ranks, a
notice when they end their ranks, and the result. Machine 0 also receives samples of their ranks for `duoka watch`.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from duoka.errors import TimedOut
from duoka.launchers.channel import FOR_FIRST, Channel, Message
from duoka.launchers.restarts import cause, is_fault, was_meant
from duoka.launchers.verdict import Doubt, Elsewhere, Verdict, agreement_key, doubt_of, without_agreement
from duoka.launchers.worker_group import Peers, WorkerGroup
from duoka.network.keys import Key
from duoka.plan import Plan
from duoka.supervision.rings import MachineSamples
from duoka.supervision.status_board import RankProgress, StatusBoard
from duoka.system.messages import printable
from duoka.watching.record import UnpublishedRun
from duoka.watching.sample import as_message, checked

TICK = 0.5  # seconds between two polls
TO_CONCLUDE = 60.0  # seconds for the others to end their ranks: longer than scripts have to answer a signal


@dataclass(frozen=True, slots=True)
class EndNotice:
    """Another machine ends its ranks, or is lost. asked: the signal that it was sent, if that is the reason."""

    machine: int
    asked: signal.Signals | None = None


class SingleMachine(Peers):
    """The null object for a run on one machine. key: of the run, inherited by its workers."""

    gloo: str | None = "lo"

    def __init__(self) -> None:
        self.key = Key(secrets.token_bytes(32))

    def begin(self, number: int) -> None:
        """Start an attempt."""

    def start(self, group: WorkerGroup, port: int) -> None:
        """Let the workers start. port: of the store, on machine 0."""
        group.go(port)

    def show(self, board: StatusBoard, seconds: float = 0.0, debugged: bool = False, last: bool = False) -> None:
        """Send the progress of this machine's ranks, if the last message is older than `seconds`.

        debugged: one of them is in a debugger. last: they will make no more progress.
        """

    def all_sent_last_progress(self) -> bool:
        """Return whether all other machines have sent the last progress of their ranks."""
        return True

    def share_samples(self, run: UnpublishedRun, board: StatusBoard) -> None:
        """Write samples of the other machines' ranks on machine 0's board, for `duoka watch` and reports there.

        The others answer each progress message of machine 0. So none are sent to a command that does not read.
        """

    def progress(self) -> dict[int, RankProgress]:
        """Return the progress of the other machines' ranks, by rank."""
        return {}

    def is_debugging(self) -> bool:
        """Return whether a rank of another machine is in a debugger."""
        return False

    def announced_end(self) -> EndNotice | None:
        """Return the notice of another machine that ends its ranks or is lost; None if there is none."""
        return None

    def announce_end(self, asked: signal.Signals | None = None) -> None:
        """Tell the other machines that this one ends its ranks."""

    def conclude(self, verdict: Verdict, group: WorkerGroup) -> Verdict:
        """Return the verdict on the whole run, given that on this machine's ranks."""
        return verdict


class SeveralMachines(SingleMachine):
    """The other machines of a run on several. gloo: the network interface towards them."""

    def __init__(self, channel: Channel, plan: Plan, gloo: str | None, run_id: str) -> None:
        self._channel, self._plan, self.gloo = channel, plan, gloo
        self.key = channel.key.derived(f"objects {run_id}")
        self.files = (channel.file,)
        self.begin(0)

    def read(self) -> None:
        self._channel.read()

    def close_files(self) -> None:
        self._channel.close_files()

    def begin(self, number: int) -> None:
        self._attempt = number
        self._shown_at = self._answered_at = 0.0
        self._received_at: dict[int, float] = {}
        self._has_announced_end = False

    def start(self, group: WorkerGroup, port: int) -> None:
        if self._channel.number == 0:
            self._send("port", port)
        group.wait(lambda: bool(self._ready() or group.signals.stops or group.failed()), self._plan.timeout)
        if ports := self._received("port"):
            group.go(ports[0].value)
        elif not self._ready() and not group.signals.stops and not group.failed():
            limit = f"{self._plan.timeout:g} s"
            raise TimedOut(f"{self._called(self._channel.number)} gave up waiting for {self._called(0)}: {limit}")

    def _ready(self) -> bool:
        return bool(self._received("port")) or self.announced_end() is not None

    def _send(self, what: str, value: Any) -> None:
        self._channel.send(f"{what} {self._attempt}", value)

    def _received(self, what: str) -> Mapping[int, Message]:
        return self._channel.messages(f"{what} {self._attempt}")

    def _called(self, machine: int) -> str:
        return self._plan.machines.called(machine)

    # Progress.

    def show(self, board: StatusBoard, seconds: float = 0.0, debugged: bool = False, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._shown_at >= seconds:
            self._shown_at = now
            seats = {rank: _serialised(board.read(rank)) for rank in board.ranks}
            self._send("progress", {"seats": seats, "debugged": debugged, "last": last})

    def all_sent_last_progress(self) -> bool:
        shown = (machine for machine, message in self._received("progress").items() if message.value["last"])
        return len({*shown, *self._channel.lost, self._channel.number}) == self._plan.machines.count

    def progress(self) -> dict[int, RankProgress]:
        return {
            int(rank): _progress_of(slot, message.at)
            for machine, message in self._received("progress").items()
            if machine != self._channel.number
            for rank, slot in message.value["seats"].items()
        }

    def share_samples(self, run: UnpublishedRun, board: StatusBoard) -> None:
        if self._channel.number == 0:
            for machine, message in self._channel.messages(f"{FOR_FIRST}samples {self._attempt}").items():
                if message.at != self._received_at.get(machine):
                    self._received_at[machine] = message.at
                    with suppress(ValueError):  # without samples it is shown as silent
                        ranks = checked(message.value, self._plan.machines.workers[machine])
                        board.remote_samples.write(machine, MachineSamples(message.at, ranks))
        elif 0 in (shown := self._received("progress")) and shown[0].at != self._answered_at:
            self._answered_at = shown[0].at
            if (sample := run.sample()) is not None:
                self._channel.send(f"{FOR_FIRST}samples {self._attempt}", as_message(sample.ranks))

    def is_debugging(self) -> bool:
        return any(message.value["debugged"] for message in self._received("progress").values())

    # The end.

    def announce_end(self, asked: signal.Signals | None = None) -> None:
        if not self._has_announced_end:
            self._has_announced_end = True
            self._send("announce_end", None if asked is None else int(asked))

    def announced_end(self) -> EndNotice | None:
        for machine, message in self._received("announce_end").items():
            if machine != self._channel.number:
                return EndNotice(machine, None if message.value is None else signal.Signals(message.value))
        gone = (machine for machine in self._channel.lost if machine not in self._received("verdict"))
        return next((EndNotice(machine) for machine in gone), None)

    def conclude(self, verdict: Verdict, group: WorkerGroup) -> Verdict:
        """Wait for the results of all machines: without limit while all goes well, else for 60 s."""
        self._send("verdict", asdict(_result_of(verdict, group)))
        deadline = None
        while not self._has_all_results():
            if group.signals.stops:
                self.announce_end(group.signals.stops[0])
            if deadline is None and (self._has_announced_end or self.announced_end()):
                deadline = time.monotonic() + TO_CONCLUDE
            if (deadline is not None and time.monotonic() > deadline) or group.signals.interrupts > 1:
                break
            group.listen(TICK)
        results = {machine: MachineResult(**message.value) for machine, message in self._received("verdict").items()}
        results = {machine: replace(one, cause=printable(one.cause)) for machine, one in results.items()}
        return self._concluded(verdict, results | {self._channel.number: _result_of(verdict, group)})

    def _has_all_results(self) -> bool:
        """Return whether each other machine has sent its result or is lost, so that no more results can come."""
        results = self._received("verdict")
        return 0 in self._channel.lost or len({*results, *self._channel.lost}) == self._plan.machines.count

    def _concluded(self, verdict: Verdict, results: Mapping[int, MachineResult]) -> Verdict:
        silent = [machine for machine in range(self._plan.machines.count) if machine not in results]
        chosen = choose(results, silent)
        saved = max((one.saved for one in results.values() if one.saved is not None), default=None)
        if any(one.why == "stopped" for one in results.values()):
            return replace(verdict, why="stopped", code=_code_when_stopped(results.values(), silent))
        agreed = agree(results, silent)
        left = [machine for machine, one in results.items() if one.why == "well"]
        if chosen is not None and chosen in results and results[chosen].doubt >= Doubt.FOLLOWS and left:
            words = f"the scripts of {self._called(left[0])} ended while other ranks went on"
            return self._elsewhere(verdict, 1, Elsewhere(words, True), saved)
        if agreed or chosen in (None, self._channel.number):
            return replace(verdict if agreed else without_agreement(verdict), saved=saved)
        why = self._channel.lost.get(chosen, "it did not report how its ranks ended")
        gone = MachineResult("gone", 1, f"{self._called(chosen)} is gone: {why}", Doubt.GONE)
        one = results.get(chosen, gone)
        words = one.cause if one is gone else f"{one.cause} (on {self._plan.machines.where(chosen)})"
        return self._elsewhere(verdict, one.code, Elsewhere(words, one.fault), saved)

    def _elsewhere(self, verdict: Verdict, code: int, elsewhere: Elsewhere, saved: int | None) -> Verdict:
        """Return the verdict for a run that ended because of another machine."""
        ended = {worker.rank: worker for worker in (*verdict.culprits, *verdict.others) if worker.failed}
        return Verdict("elsewhere", code, others=tuple(ended.values()), saved=saved, elsewhere=elsewhere)


@dataclass(frozen=True, slots=True)
class MachineResult:
    """The end of a machine's ranks, as sent to the others.

    why, code, saved: of its verdict. cause: what ended them, in a few words. doubt: a `Doubt`.
    way: equal on machines whose ranks all ended in the same way; None: ranks of this machine ended differently.
    fault: the run may be restarted after it.
    """

    why: str
    code: int
    cause: str
    doubt: int = 0
    way: str | None = None
    fault: bool = False
    saved: int | None = None


def choose(results: Mapping[int, MachineResult], silent: Sequence[int]) -> int | None:
    """Return the machine that ended the run: the first with the least doubt; None if all ended well.

    results: results, in the order in which all machines received them. silent: machines without a result.
    """
    causes = {machine: one.doubt for machine, one in results.items() if one.why != "well"}
    causes |= dict.fromkeys(silent, int(Doubt.GONE))
    return min(causes, key=causes.__getitem__, default=None)


def agree(results: Mapping[int, MachineResult], silent: Sequence[int]) -> bool:
    """Return whether the ranks of all machines ended in the same way."""
    return not silent and len({one.way if one.why == "agreed" else one.why for one in results.values()}) == 1


def _code_when_stopped(results: Collection[MachineResult], silent: Sequence[int]) -> int:
    """Return the scripts' exit code if all have the same; else the largest."""
    codes = {one.code for one in results}
    return codes.pop() if len(codes) == 1 and not silent else max(codes)


def _result_of(verdict: Verdict, group: WorkerGroup) -> MachineResult:
    """Summarise how this machine's ranks ended, to be sent to the other machines."""
    one = without_agreement(verdict)
    is_cause = one.why not in ("well", "stopped", "elsewhere")
    fault = is_cause and is_fault(one) and not was_meant(one, group.signals)
    words = cause(one) if is_cause else "its ranks were ended"
    return MachineResult(
        verdict.why, verdict.code, words, int(doubt_of(one)), agreement_key(verdict), fault, verdict.saved
    )


def _serialised(progress: RankProgress) -> list[Any]:
    waited = progress.seen - progress.since if progress.waiting else 0.0
    return [progress.begun, progress.finished, progress.number, progress.text, waited, progress.steps]


def _progress_of(values: Sequence[Any], received_at: float) -> RankProgress:
    begun, finished, number, text, waited, steps = values
    return RankProgress(begun, finished, number, printable(text), received_at - waited, received_at, steps, 0.0)
