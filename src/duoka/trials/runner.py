"""Run trials one after the other, with workers like those of `duoka run`, in a folder that is removed."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from duoka.errors import DuokaError, RunError, ScriptError
from duoka.launchers.local import RunContext, attempt, import_once
from duoka.launchers.processes import Outputs, Signals
from duoka.launchers.verdict import Verdict
from duoka.planning.plan import Plan
from duoka.system.processes import is_alive
from duoka.trials.observer import TrialObserver, end_of
from duoka.watching.record import PublishedRun

LOG_LINES = 12


class Stopped(Exception):
    """A signal asked for an end. code: the exit code to return."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


class TrialFailed(RunError):
    """A trial failed. report: the output of the script and its error, for the user."""

    def __init__(self, name: str, what: str, report: str) -> None:
        self.report = report
        super().__init__(f"{name}: {what}")


class NoSteps(DuokaError):
    """The script made no step of an optimizer."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name}: the script ended without a step of an optimizer of torch.optim in this process, so there is "
            f"nothing to {why}; give the arguments with which it trains (after a --), or --kind"
        )


@contextmanager
def trial_runner(command: str, log_dir: Path | None) -> Iterator[TrialRunner]:
    """Create a trial runner of this process; its folder is removed at the end.

    Raises RunError if the folder cannot be created.
    """
    # Signals are only noted from here on: the folder is removed before the command ends.
    with Signals() as signals, _folder(f"duoka-{command}-") as folder:
        yield TrialRunner(folder, signals, log_dir)


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials. log_dir: where to keep the script's output, or None."""

    folder: Path
    signals: Signals
    log_dir: Path | None

    @contextmanager
    def run(self, name: str, plan: Plan, observer: TrialObserver) -> Iterator[Path]:
        """Run the first steps of a plan's script; yields the folder with the record, which is removed at the end.

        name: of the trial, for messages. Raises TrialFailed if the script failed before it had made all steps,
        ScriptError if it cannot be run, and Stopped if a signal asked for an end.
        """
        home = Path(tempfile.mkdtemp(dir=self.folder))
        observer.folder, observer.scratch = home / "seen", home / "scratch"
        observer.folder.mkdir()
        try:
            self._run(name, plan, observer)
            yield observer.folder
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _run(self, name: str, plan: Plan, observer: TrialObserver) -> None:
        # No limit that follows from the slowest step so far: what is observed may take long in any step.
        plan = replace(plan, step_timeout=plan.timeout, restarts=0)
        logs = None if self.log_dir is None else self.log_dir / name.replace("/", "-").replace(" ", "-")
        outputs = Outputs(logs, range(plan.world_size))
        messages: list[str] = []
        try:
            import_once(replace(plan, threads=None))  # a trial has its own setting of threads
            with closing(PublishedRun(plan, is_shown=False)) as record:
                run_id, write, seed = secrets.token_hex(8), messages.append, observer.seed
                run = RunContext(plan, run_id, outputs, self.signals, record, write, None, observer, seed)
                verdict = attempt(run, 0)
            self.check()
            _check(name, observer.folder, verdict, "".join(messages), outputs)
        finally:
            outputs.close()
            shutil.rmtree(observer.scratch, ignore_errors=True)

    def check(self) -> None:
        self.signals.read()
        if self.signals.stops:
            raise Stopped(128 + self.signals.stops[0])


def _check(name: str, seen: Path, verdict: Verdict, messages: str, outputs: Outputs) -> None:
    end = end_of(seen)
    if end is not None and end.how != "failed" and (end.how == "enough" or verdict.code == 0):
        return
    for worker in verdict.culprits:  # a script that cannot be run at all is no failure of a trial
        if worker.ending is not None and worker.ending.said.startswith("duoka: error: "):
            raise ScriptError(worker.ending.said.removeprefix("duoka: error: "))
    log = outputs.tail(0, LOG_LINES) if verdict.why in ("died", "exited") else []
    report = messages + "".join(f"  {line}\n" for line in log)
    when = "" if end is None else f" after step {end.steps}" if end.steps else " before its first step"
    raise TrialFailed(name, f"the script failed{when}", report)


@contextmanager
def _folder(prefix: str) -> Iterator[Path]:
    """Create a folder and remove it at the end; also remove those of killed commands."""
    home = Path(tempfile.gettempdir())
    for left in home.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        # A process that was killed may have had the number that this one has now.
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


WIDTH = 240  # columns, if standard output is not a terminal


def render_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> str:
    """Format a table as text, as wide as the terminal if there is one. right: columns whose texts end at one edge."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(table)
    written: str = console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in written.splitlines())
