"""Where trials are run, one after the other: a folder that is removed, workers as those of `duoka run`."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from duoka.errors import DuokaError, RunError, ScriptError
from duoka.launchers.local import Run, attempt, import_once
from duoka.launchers.output import Outputs
from duoka.launchers.processes import is_alive
from duoka.launchers.signals import Signals
from duoka.launchers.verdict import Verdict
from duoka.plan import Plan
from duoka.trials.accompany import Companion, Places, end_of

LOG_LINES = 12


class Stopped(Exception):
    """A signal asked for an end. code: the exit code that says so."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


class TrialFailed(RunError):
    """A run came to no end of which anything could be learned. report: all that it left to be read."""

    def __init__(self, name: str, what: str, report: str) -> None:
        self.report = report
        super().__init__(f"{name}: {what}")


class NoSteps(DuokaError):
    """A script that makes no step of an optimizer has nothing to be looked at."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name}: the script ended without a step of an optimizer of torch.optim in this process, so there is "
            f"nothing to {why}; give the arguments with which it trains (after a --), or --kind"
        )


@contextmanager
def stage(command: str, log_dir: Path | None) -> Iterator[Stage]:
    """A stage of this process; nothing of it is left at the end.

    Raises:
        RunError: its folder cannot be made.
    """
    with Signals() as signals, _folder(f"duoka-{command}-") as folder:
        yield Stage(folder, signals, log_dir)


@dataclass(frozen=True)
class Stage:
    """Runs trials. log_dir: where what the script prints is kept, or None."""

    folder: Path
    signals: Signals
    log_dir: Path | None

    @property
    def sockets(self) -> Path:
        """A folder with a short name: the path of a socket has 107 characters."""
        folder = self.folder / "s"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def played(self, name: str, plan: Plan, make: Callable[[Places], Companion]) -> Iterator[Path]:
        """Run the first steps of a plan's script; the folder with what was seen, which is removed at the end.

        name: what the trial is called. make: makes what accompanies the script.

        Raises:
            TrialFailed: the script ended badly before it had made all steps.
            ScriptError: it cannot be run at all.
            Stopped: somebody asked for an end.
        """
        home = Path(tempfile.mkdtemp(dir=self.folder))
        places = Places(home / "seen", home / "scratch", self.sockets)
        places.seen.mkdir()
        try:
            self._play(name, plan, make(places))
            yield places.seen
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _play(self, name: str, plan: Plan, companion: Companion) -> None:
        plan = replace(plan, step_timeout=plan.timeout, restarts=0)
        logs = None if self.log_dir is None else self.log_dir / name.replace("/", "-").replace(" ", "-")
        outputs = Outputs(logs, range(plan.world_size))
        told: list[str] = []
        try:
            import_once(replace(plan, threads=None))  # a trial's threads are its own
            run = Run(plan, secrets.token_hex(8), outputs, self.signals, told.append, None, companion, companion.seed)
            verdict = attempt(run, 0)
            self.check()
            _check(name, companion.places.seen, verdict, "".join(told), outputs)
        finally:
            outputs.close()
            shutil.rmtree(companion.places.scratch, ignore_errors=True)

    def check(self) -> None:
        """See whether somebody asked for an end.

        Raises:
            Stopped: so it is.
        """
        self.signals.read()
        if self.signals.stops:
            raise Stopped(128 + self.signals.stops[0])


def _check(name: str, seen: Path, verdict: Verdict, told: str, outputs: Outputs) -> None:
    """See that the trial came to a good end."""
    end = end_of(seen)
    if end is not None and end.how != "failed" and (end.how == "enough" or verdict.code == 0):
        return
    for worker in verdict.culprits:
        if worker.ending is not None and worker.ending.said.startswith("duoka: error: "):
            raise ScriptError(worker.ending.said.removeprefix("duoka: error: "))
    log = outputs.tail(0, LOG_LINES) if verdict.why in ("died", "exited") else []
    report = told + "".join(f"  {line}\n" for line in log)
    when = "" if end is None else f" after step {end.steps}" if end.steps else " before its first step"
    raise TrialFailed(name, f"the script failed{when}", report)


@contextmanager
def _folder(prefix: str) -> Iterator[Path]:
    """A folder that is removed at the end; what earlier commands have left that were killed, is removed now."""
    home = Path(tempfile.gettempdir())
    for left in home.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        is_over = pid.isdecimal() and (int(pid) == os.getpid() or not is_alive(int(pid)))
        if is_over and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=home))
    except OSError as error:
        text = f"a folder in {home}, for what is seen of the script, cannot be made: {error.strerror}"
        raise RunError(text) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
