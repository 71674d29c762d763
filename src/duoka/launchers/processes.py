"""Processes of a run: forked from the command, told of its signals, and ended with it; log files for their output."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from duoka.errors import OptionError
from duoka.supervision import tracebacks
from duoka.system.libc import die_with, flush_c_streams
from duoka.system.processes import session_members

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TO_INTERRUPT = 0.5  # seconds between SIGINT and SIGTERM for a DataLoader's workers
LOADER_WORKER = "pt_data_worker"  # the name that torch gives to their processes
MEANT_FOR_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send them to the process that they started


class Signals:
    """Convert signals to bytes readable from `fd`, so that one select call waits for everything."""

    def __init__(self) -> None:
        self.stops: list[signal.Signals] = []  # received requests to end, in order
        self.for_scripts: list[signal.Signals] = []  # received signals meant for the scripts
        self.fd, self._inlet = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        # Python writes each signal's number there from its handler in C, so none is lost between two selects. In a
        # full pipe there are numbers enough to wake this process.
        self._wakeup_before = signal.set_wakeup_fd(self._inlet, warn_on_full_buffer=False)
        # A process started with a signal ignored (nohup, a background job) goes on to ignore it.
        taken = {signal.SIGCHLD, *(each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN)}
        # The default of those for scripts would end this process and its workers.
        taken |= {each for each in MEANT_FOR_SCRIPTS if signal.getsignal(each) is signal.SIG_DFL}
        # Their handlers do nothing; but without one Python writes no number.
        self._before = {each: signal.signal(each, lambda number, frame: None) for each in taken}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers; also called in workers."""
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self.fd)
            os.close(self._inlet)

    @property
    def interrupts(self) -> int:
        """Number of SIGINTs received."""
        return self.stops.count(signal.SIGINT)

    def read(self) -> None:
        """Read the signals that have arrived."""
        with suppress(BlockingIOError):
            while received := os.read(self.fd, 4096):
                taken = [signal.Signals(number) for number in received if number in self._before]
                self.stops += [each for each in taken if each in STOPS]
                self.for_scripts += [each for each in taken if each in MEANT_FOR_SCRIPTS]


@contextmanager
def blocked() -> Iterator[set[int]]:
    """Block all signals within, as a child must not handle one meant for its parent; yield the mask until then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def fork(life: Callable[[], int], signals: Signals) -> int:
    """Fork a child that leads its own session, runs `life` and exits with the code that it returns.

    The child is killed when this process dies. It has Python's default signal handlers, and never returns to the
    caller's code. Returns its pid.
    """
    for stream in (sys.stdout, sys.stderr):  # else each worker would write what is buffered again
        with suppress(Exception):
            stream.flush()
    flush_c_streams()
    parent = os.getpid()
    with blocked() as before:
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with(parent)
            os.setsid()  # by its session all that it starts is found; and Ctrl-C reaches the parent alone
            signals.restore()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # its own handlers are in place
            os._exit(life())
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:
            with suppress(BaseException):
                print(tracebacks.shown(error), end="", file=sys.stderr, flush=True)
            os._exit(1)


def redirect(output: IO[bytes] | None, stdin: bool) -> None:
    """Redirect this process's standard output and error to a file; None leaves both where they are.

    stdin: keep standard input; otherwise it reads /dev/null.
    """
    if not stdin:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if output is not None:
            os.dup2(output.fileno(), descriptor)
        if isinstance(stream, TextIOWrapper):
            if output is not None:  # each line is written at once: the log is complete when the process crashes
                stream.reconfigure(line_buffering=True)
        # From a fork, a notebook's stream sends each piece of a line by a connection of its own, in any order. What
        # is written to the descriptor, a thread of the kernel shows in the cell, in order.
        elif output is not None or hasattr(stream, "watch_fd_thread"):
            setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115


class Outputs:
    """The log files of some ranks: in `--log-dir`, else unnamed temporary files, named when something must be kept.

    An unnamed file disappears with the processes that have it open. files: by rank; the others write to the terminal.
    Raises OptionError if the files cannot be created.
    """

    def __init__(self, log_dir: Path | None, ranks: range) -> None:
        self._log_dir, self._ranks = log_dir, ranks
        self.files: dict[int, IO[bytes]] = {}
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Open empty files for an attempt: in `--log-dir` for the first, in its folder restartN for the others."""
        self.close()
        self._dir = self._log_dir
        try:
            if self._dir is not None and self._ranks:
                self._dir = self._dir / f"restart{attempt}" if attempt else self._dir
                self._dir.mkdir(parents=True, exist_ok=True)
            for rank in self._ranks:
                named = self._dir and (self._dir / f"rank{rank}.log").open("w+b")
                self.files[rank] = named or tempfile.TemporaryFile(prefix="duoka-")  # noqa: SIM115
        except OSError as error:
            folder = str(self._log_dir) if self._log_dir else None
            raise OptionError("--log-dir", folder, "a directory that can be written", str(error)) from None

    def tail(self, rank: int, lines: int) -> list[str]:
        """Return the last lines of the log file of `rank`."""
        file = self.files.get(rank)
        if file is None:
            return []
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - 300 * lines)
        text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
        return [line[:300] for line in text.splitlines()[-lines:]]

    def keep(self, more: dict[str, str]) -> Path | None:
        """Keep the log files after the run, and write `more` (name → text) beside them.

        Returns their folder; None if there is nothing to keep.
        """
        written = {rank: file for rank, file in self.files.items() if os.fstat(file.fileno()).st_size}
        if not written and not more:
            return None
        try:
            if self._dir is None:
                self._dir = Path(tempfile.mkdtemp(prefix="duoka-"))
                for rank, file in written.items():
                    file.seek(0)
                    with (self._dir / f"rank{rank}.log").open("wb") as kept:
                        shutil.copyfileobj(file, kept)
            for name, text in more.items():
                (self._dir / name).write_text(text)
        except OSError:  # a full disk must not hide the error of the run
            return None
        return self._dir

    def close(self) -> None:
        """Close the files."""
        for file in self.files.values():
            file.close()
        self.files.clear()


@contextmanager
def orphan_reaper(
    sessions: Sequence[int], temporary: str | None, close_files: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within the context, run a process that ends all processes of these sessions if this process is killed.

    The kernel then kills the workers (PR_SET_PDEATHSIG), but not the processes that they started, such as loader
    workers: they do not inherit that setting, and it also triggers when only a thread of the parent ends.

    Enter it after forking the workers, which must not inherit the pipe: its end of file tells that this process died.
    temporary: directory that the workers may create; removed at the end, or by the reaper. close_files: closes, in
    the reaper, files that would keep connections of this process open.
    """

    def remove() -> None:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    reading, writing = os.pipe()
    with blocked():  # in the reaper for ever: only SIGKILL ends it before its work is done
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that Ctrl-C does not reach it
            os.close(writing)
            close_files()
            os.read(reading, 1)  # returns at the end of file, when the last copy of `writing` is closed
            interrupt_loader_workers(sessions)
            while kill_sessions(sessions):  # processes may start others meanwhile
                pass
            remove()
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        remove()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writing)  # last: for the reaper this is the end of this process


def interrupt_loader_workers(sessions: Sequence[int]) -> None:
    """Send SIGINT to the DataLoader's worker processes of these sessions, and wait some 0.5 s for their end.

    They end by it as at Ctrl-C. A worker ended by SIGTERM or SIGKILL while torch makes the shared memory of a batch
    leaves the batch's memory in /dev/shm for ever.
    """
    interrupted: set[int] = set()
    pause = 0.01  # seconds
    for _ in range(round(TO_INTERRUPT / pause)):  # not a deadline: on a busy machine the workers are slow, too
        left = set(session_members(sessions, LOADER_WORKER))
        if not left:
            return
        for pid in left - interrupted:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        interrupted |= left
        time.sleep(pause)


def kill_sessions(sessions: Sequence[int]) -> bool:
    """Kill all processes of these sessions; return whether there were any."""
    members = session_members(sessions)
    for pid in members:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(members)
