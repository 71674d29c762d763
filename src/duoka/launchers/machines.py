"""Several machines: what their commands tell each other of a run.

Each command has its own workers, watches them as on one machine, and judges how they ended. Of the others it knows
how far their ranks are, that they end them, and how those ended.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from duoka.board import Board, Progress
from duoka.errors import TimedOut
from duoka.keys import Key
from duoka.launchers.crew import Crew, Others
from duoka.launchers.restarts import cause, is_fault, was_meant
from duoka.launchers.talk import Said, Talk
from duoka.launchers.verdict import Doubt, Elsewhere, Verdict, apart, doubt_of, way_of
from duoka.plan import Plan
from duoka.printable import printable

TICK = 0.5  # seconds between two looks
TO_CONCLUDE = 60.0  # seconds that the others have to end their ranks: longer than a script may answer a signal


@dataclass(frozen=True, slots=True)
class Alarm:
    """A machine ends its ranks, or is gone. asked: the signal by which it was asked to."""

    machine: int
    asked: signal.Signals | None = None


class Alone(Others):
    """The other machines of a run that has none. key: of the run, which its workers inherit."""

    gloo: str | None = "lo"

    def __init__(self) -> None:
        self.key = Key(secrets.token_bytes(32))

    def begin(self, number: int) -> None:
        """An attempt begins."""

    def start(self, crew: Crew, port: int) -> None:
        """Let the workers begin, which meet at this port of machine 0's."""
        crew.go(port)

    def show(self, board: Board, seconds: float = 0.0, debugged: bool = False, last: bool = False) -> None:
        """Tell how far this machine's ranks are, so many seconds after the last time.

        debugged: whether one of them is in a debugger. last: whether they will come no further.
        """

    def have_shown(self) -> bool:
        """Whether all others have told how far their ranks came at last."""
        return True

    def progress(self) -> dict[int, Progress]:
        """How far the other machines' ranks are, by rank."""
        return {}

    def is_debugging(self) -> bool:
        """Whether one of them is in a debugger."""
        return False

    def alarmed(self) -> Alarm | None:
        """Whether another machine ends its ranks, or is gone before it told how they ended."""
        return None

    def alarm(self, asked: signal.Signals | None = None) -> None:
        """Tell that this machine ends its ranks."""

    def conclude(self, verdict: Verdict, crew: Crew) -> Verdict:
        """What ended the run, of which this machine has seen `verdict`."""
        return verdict


class Several(Alone):
    """The other machines of a run, as the command of this one knows them. gloo: the network device between them."""

    def __init__(self, talk: Talk, plan: Plan, gloo: str | None, run_id: str) -> None:
        self._talk, self._plan, self.gloo = talk, plan, gloo
        self.key = talk.key.derived(f"objects {run_id}")
        self.files = (talk.file,)
        self.begin(0)

    def read(self) -> None:
        self._talk.read()

    def let_go(self) -> None:
        self._talk.let_go()

    def begin(self, number: int) -> None:
        self._attempt = number
        self._shown_at = 0.0
        self._has_alarmed = False

    def start(self, crew: Crew, port: int) -> None:
        if self._talk.number == 0:
            self._say("port", port)
        crew.wait(lambda: bool(self._ready() or crew.signals.stops or crew.failed()), self._plan.timeout)
        if ports := self._heard("port"):
            crew.go(ports[0].value)
        elif not self._ready() and not crew.signals.stops and not crew.failed():
            limit = f"{self._plan.timeout:g} s"
            raise TimedOut(f"{self._called(self._talk.number)} waited in vain for {self._called(0)}: {limit}")

    def _ready(self) -> bool:
        return bool(self._heard("port")) or self.alarmed() is not None

    def _say(self, what: str, value: Any) -> None:
        self._talk.say(f"{what} {self._attempt}", value)

    def _heard(self, what: str) -> Mapping[int, Said]:
        return self._talk.heard(f"{what} {self._attempt}")

    def _called(self, machine: int) -> str:
        return self._plan.machines.called(machine)

    # How far the ranks are.

    def show(self, board: Board, seconds: float = 0.0, debugged: bool = False, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._shown_at >= seconds:
            self._shown_at = now
            seats = {rank: _told_of(board.read(rank)) for rank in board.ranks}
            self._say("progress", {"seats": seats, "debugged": debugged, "last": last})

    def have_shown(self) -> bool:
        shown = (machine for machine, said in self._heard("progress").items() if said.value["last"])
        return len({*shown, *self._talk.lost, self._talk.number}) == self._plan.machines.count

    def progress(self) -> dict[int, Progress]:
        return {
            int(rank): _progress_of(seat, said.at)
            for machine, said in self._heard("progress").items()
            if machine != self._talk.number
            for rank, seat in said.value["seats"].items()
        }

    def is_debugging(self) -> bool:
        return any(said.value["debugged"] for said in self._heard("progress").values())

    # How they ended.

    def alarm(self, asked: signal.Signals | None = None) -> None:
        if not self._has_alarmed:
            self._has_alarmed = True
            self._say("alarm", None if asked is None else int(asked))

    def alarmed(self) -> Alarm | None:
        for machine, said in self._heard("alarm").items():
            if machine != self._talk.number:
                return Alarm(machine, None if said.value is None else signal.Signals(said.value))
        gone = (machine for machine in self._talk.lost if machine not in self._heard("verdict"))
        return next((Alarm(machine) for machine in gone), None)

    def conclude(self, verdict: Verdict, crew: Crew) -> Verdict:
        """Waits for all machines: until they end, if all goes well; else for a minute."""
        self._say("verdict", asdict(_told(verdict, crew)))
        deadline = None
        while not self._all_told():
            if crew.signals.stops:
                self.alarm(crew.signals.stops[0])
            if deadline is None and (self._has_alarmed or self.alarmed()):
                deadline = time.monotonic() + TO_CONCLUDE
            if (deadline is not None and time.monotonic() > deadline) or crew.signals.interrupts > 1:
                break
            crew.listen(TICK)
        told = {machine: Told(**said.value) for machine, said in self._heard("verdict").items()}
        told = {machine: replace(one, cause=printable(one.cause)) for machine, one in told.items()}
        return self._concluded(verdict, told | {self._talk.number: _told(verdict, crew)})

    def _all_told(self) -> bool:
        """Whether there is nobody left who could still tell."""
        told = self._heard("verdict")
        return 0 in self._talk.lost or len({*told, *self._talk.lost}) == self._plan.machines.count

    def _concluded(self, verdict: Verdict, told: Mapping[int, Told]) -> Verdict:
        silent = [machine for machine in range(self._plan.machines.count) if machine not in told]
        chosen = choose(told, silent)
        saved = max((one.saved for one in told.values() if one.saved is not None), default=None)
        if any(one.why == "stopped" for one in told.values()):
            return replace(verdict, why="stopped", code=_code_when_stopped(told.values(), silent))
        agreed = agree(told, silent)
        left = [machine for machine, one in told.items() if one.why == "well"]
        if chosen is not None and chosen in told and told[chosen].doubt >= Doubt.FOLLOWS and left:
            words = f"the ranks of {self._called(left[0])} left: their scripts ended there, while others went on"
            return self._elsewhere(verdict, 1, Elsewhere(words, True), saved)
        if agreed or chosen in (None, self._talk.number):
            return replace(verdict if agreed else apart(verdict), saved=saved)
        why = self._talk.lost.get(chosen, "it does not say how its ranks ended")
        gone = Told("gone", 1, f"{self._called(chosen)} is gone: {why}", Doubt.GONE)
        one = told.get(chosen, gone)
        words = one.cause if one is gone else f"{one.cause} (on {self._plan.machines.where(chosen)})"
        return self._elsewhere(verdict, one.code, Elsewhere(words, one.fault), saved)

    def _elsewhere(self, verdict: Verdict, code: int, elsewhere: Elsewhere, saved: int | None) -> Verdict:
        """The end of a run whose cause this machine was told."""
        ended = {worker.rank: worker for worker in (*verdict.culprits, *verdict.others) if worker.failed}
        return Verdict("elsewhere", code, others=tuple(ended.values()), saved=saved, elsewhere=elsewhere)


@dataclass(frozen=True, slots=True)
class Told:
    """How a machine's ranks ended, as it tells the others.

    why, code, saved: of its verdict. cause: what ended them, in a few words. doubt: whether that may have a cause.
    way: equal on machines whose ranks all ended in the same way of their own; None: they did not.
    fault: whether the run may begin again after it.
    """

    why: str
    code: int
    cause: str
    doubt: int = 0
    way: str | None = None
    fault: bool = False
    saved: int | None = None


def choose(told: Mapping[int, Told], silent: Sequence[int]) -> int | None:
    """The machine that ended the run: the first that told of a cause, and not of what follows from one; None: none.

    told: in the order in which all machines heard it. silent: the machines that did not tell.
    """
    causes = {machine: one.doubt for machine, one in told.items() if one.why != "well"}
    causes |= dict.fromkeys(silent, int(Doubt.GONE))
    return min(causes, key=causes.__getitem__, default=None)


def agree(told: Mapping[int, Told], silent: Sequence[int]) -> bool:
    """Whether the ranks of all machines ended in the very same way."""
    return not silent and len({one.way if one.why == "agreed" else one.why for one in told.values()}) == 1


def _code_when_stopped(told: Collection[Told], silent: Sequence[int]) -> int:
    """The scripts' own exit code, if all have the same; else one that was chosen for the signal."""
    codes = {one.code for one in told}
    return codes.pop() if len(codes) == 1 and not silent else max(codes)


def _told(verdict: Verdict, crew: Crew) -> Told:
    """What this machine tells of its own."""
    one = apart(verdict)
    is_cause = one.why not in ("well", "stopped", "elsewhere")
    fault = is_cause and is_fault(one) and not was_meant(one, crew.signals)
    words = cause(one) if is_cause else "its ranks were ended"
    return Told(verdict.why, verdict.code, words, int(doubt_of(one)), way_of(verdict), fault, verdict.saved)


def _told_of(progress: Progress) -> list[Any]:
    waited = progress.seen - progress.since if progress.waiting else 0.0
    return [progress.begun, progress.finished, progress.number, progress.text, waited, progress.steps]


def _progress_of(told: Sequence[Any], heard_at: float) -> Progress:
    begun, finished, number, text, waited, steps = told
    return Progress(begun, finished, number, printable(text), heard_at - waited, heard_at, steps, 0.0)
