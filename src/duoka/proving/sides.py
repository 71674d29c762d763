"""One run of the script as it is to be recorded, with what is asked for, up to the last step that is wanted."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from duoka.errors import RunError, ScriptError
from duoka.launchers.local import Run, attempt, import_once
from duoka.launchers.output import Outputs
from duoka.launchers.signals import Signals
from duoka.launchers.verdict import Verdict
from duoka.plan import Kind, Plan
from duoka.proving.recorder import Recorder
from duoka.proving.recording import Recording

LOG_LINES = 12


class Stopped(Exception):
    """A signal asked for an end. code: the exit code that says so."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


class SideFailed(RunError):
    """A run came to no end that could be compared. report: all that it left to be read."""

    def __init__(self, name: str, what: str, report: str) -> None:
        self.report = report
        super().__init__(f"{name}: {what}")


@dataclass(frozen=True)
class Side:
    """What is run. name: what it is called in the table. nudge: None, or by which seed weights are moved."""

    name: str
    plan: Plan
    nudge: int | None = None

    def nudged(self, seed: int) -> Side:
        """The same, with weights moved in their last place."""
        return Side(f"{self.name}, nudged", self.plan, seed)


def as_python(plan: Plan, threads: int | None) -> Side:
    """The script of a plan on the first of its devices, as `python` runs it; where it needs ranks, as one of one."""
    kind = Kind.PLAIN if plan.kind_can_be_either else plan.kind
    alone = replace(plan, devices=plan.devices[:1], strategy=plan.strategy and "single", kind=kind, threads=threads)
    name = {Kind.PLAIN: "python", Kind.API: "python", Kind.DISTRIBUTED: "one rank"}[kind]
    return Side(f"{name} ({alone.devices[0]})" if alone.devices[0].type != "cpu" else name, alone)


@dataclass(frozen=True)
class Studio:
    """Where sides are recorded, one after the other. steps: of each. seed: with which all begin.

    log_dir: where what the script prints is kept, or None.
    """

    folder: Path
    signals: Signals
    steps: int
    seed: int
    log_dir: Path | None

    @property
    def sockets(self) -> Path:
        """A folder with a short name: the path of a socket has 107 characters."""
        folder = self.folder / "s"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def recorded(self, side: Side) -> Iterator[Recording]:
        """Run a side; its recording, which is removed at the end.

        Raises:
            SideFailed: the script ended badly before it had made all steps.
            Stopped: somebody asked for an end.
        """
        home = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield self._record(side, home)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _record(self, side: Side, home: Path) -> Recording:
        folder, plan = home / "recording", replace(side.plan, step_timeout=side.plan.timeout, restarts=0)
        folder.mkdir()
        own_rows = plan.kind is Kind.DISTRIBUTED
        recorder = Recorder(folder, home / "scratch", self.sockets, self.steps, self.seed, own_rows, side.nudge)
        logs = None if self.log_dir is None else self.log_dir / side.name.replace("/", "-").replace(" ", "-")
        outputs = Outputs(logs, range(plan.world_size))
        told: list[str] = []
        try:
            import_once(replace(plan, threads=None))  # a side's threads are its own
            run = Run(plan, secrets.token_hex(8), outputs, self.signals, told.append, None, recorder, self.seed)
            verdict = attempt(run, 0)
            self.check()
            return _checked(side, Recording(folder), verdict, "".join(told), outputs)
        finally:
            outputs.close()
            shutil.rmtree(home / "scratch", ignore_errors=True)

    def check(self) -> None:
        """See whether somebody asked for an end.

        Raises:
            Stopped: so it is.
        """
        self.signals.read()
        if self.signals.stops:
            raise Stopped(128 + self.signals.stops[0])


def _checked(side: Side, recording: Recording, verdict: Verdict, told: str, outputs: Outputs) -> Recording:
    """The recording, if it is whole."""
    end = recording.end
    if end is not None and (end["enough"] or verdict.code == 0):
        return recording
    for worker in verdict.culprits:
        if worker.ending is not None and worker.ending.said.startswith("duoka: error: "):
            raise ScriptError(worker.ending.said.removeprefix("duoka: error: "))
    log = outputs.tail(0, LOG_LINES) if verdict.why in ("died", "exited") else []
    report = told + "".join(f"  {line}\n" for line in log)
    steps = f"after step {recording.steps}" if recording.steps else "before its first step"
    raise SideFailed(side.name, f"the script failed {steps}", report)
