"""`duoka.launch`: call a function on several devices from Python (a script, a notebook, a test).

Workers are forked from this process. So the function may be a closure or a lambda, nothing is imported again, and a
script needs no `if __name__ == "__main__"`. If this process has used its GPUs, which does not work after a fork, they
are forked from a new process, to which cloudpickle takes the function.
"""

from __future__ import annotations

import importlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from duoka import engines
from duoka.errors import DeviceError, OptionError, RanksApart, RunError, TimedOut, WorkerFailed
from duoka.hardware.allocation import allocate
from duoka.hardware.spec import parse
from duoka.launchers.local import RunContext, attempt
from duoka.launchers.processes import Outputs, Signals
from duoka.launchers.verdict import Verdict
from duoka.origins.process import this_process
from duoka.planning.options import Options, waiting
from duoka.planning.plan import FUNCTION, Plan, decide
from duoka.script import Target
from duoka.system import disk, environment
from duoka.system.libc import die_with, end_thread_pools
from duoka.system.messages import say
from duoka.watching.record import PublishedRun


def launch(
    function: Callable[..., Any],
    *args: Any,
    devices: str | int | Sequence[int] = "auto",
    wait: str | float = 0,
    threads: int | None = None,
    timeout: str | float = 600.0,
    step_timeout: str | float | None = None,
    log_dir: str | Path | None = None,
    rows: str | Sequence[float] = "",
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in one worker for each device, and return the results in the order of ranks.

    `duoka.start()` works in every worker. Output of ranks 1, 2, ... goes to log files.

    Args:
        function: any callable, also a closure or a lambda.
        *args: positional arguments of the function.
        devices: as `duoka run --devices`: "auto", 2, "0,3", [0, 3], "cpu:2", ...
        wait: time to queue until devices are free, in seconds or like "30m"; 0 does not wait.
        threads: CPU threads of each worker; None divides the cores.
        timeout: time that one rank waits for the others, in seconds or like "10m".
        step_timeout: the same after the first step, whatever the others do; None: 20 times the slowest step so far,
            at least 60 s, for a rank that is idle.
        log_dir: directory for the output of ranks 1, 2, ...
        rows: the devices' shares of each batch: a number for each, (3, 1) or "3:1"; "auto": as fast as each
            computes; "even"; "": auto for GPUs that differ, else even.
        **kwargs: keyword arguments of the function.

    Raises:
        OptionError: a value is not allowed; or this is a worker, or not the main thread.
        DevicesBusy: other runs use the devices, and the time to wait is over.
        DeviceError: a device does not exist; or this process has used its GPUs already, and `function` cannot be
            pickled for a new one.
        WorkerFailed: a worker died.
        RanksApart: a rank called another collective than the others, or ended while they went on.
        TimedOut: a rank did not join a collective in time.
        Exception: the first exception of a worker; its cause is the worker's traceback.
    """
    _check(function)
    words = devices if isinstance(devices, (str, int)) else ",".join(map(str, devices)) + "," * (len(devices) == 1)
    options = Options(
        Target(getattr(function, "__name__", type(function).__name__)),
        devices=str(words),
        threads=threads,
        timeout=waiting(timeout, "timeout"),
        step_timeout=None if step_timeout is None else waiting(step_timeout, "step_timeout"),
        log_dir=None if log_dir is None else Path(log_dir),
        rows=rows if isinstance(rows, str) else ":".join(map(str, rows)),
    )
    allocation = allocate(
        parse(options.devices),
        f"duoka.launch({options.target.name})",
        lambda seen: decide(options, seen, environment.threads(), FUNCTION),
        lambda plan: plan.devices,
        waiting(wait),
        say,
    )
    plan = replace(allocation.decided, notes=(*allocation.decided.notes, *allocation.notes))
    call = partial(function, *args, **kwargs)
    with allocation.locks:
        if plan.devices[0].type == "cpu" or _forks_can_use_gpus():
            return start_workers(plan, call)
        results: list[Any] = call_in_new_process(start_workers, plan, call)
        return results


def _check(function: Any) -> None:
    if not callable(function):
        raise OptionError("duoka.launch", function, "given a function", "the function itself, without calling it")
    task = engines.find()
    if this_process().origin is not None or (task is not None and task.count > 1):
        hint = "start this script with python, or call duoka.start() and leave the launching to its launcher"
        raise OptionError("duoka.launch", "called in one of its workers", "called outside of them", hint)
    if threading.current_thread() is not threading.main_thread():
        raise OptionError("duoka.launch", threading.current_thread().name, "called in the main thread")


def _forks_can_use_gpus() -> bool:
    """Return whether GPUs work in forks of this process: not after their first call, also one that only asks."""
    if "torch" not in sys.modules:
        return True
    from duoka.hardware import accelerator
    from duoka.private.torch import is_in_bad_fork

    module = accelerator.module()
    if module is None or accelerator.in_use():
        return module is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; this fork needs none
        pid = os.fork()
    if pid == 0:
        os._exit(is_in_bad_fork(module))  # only a fork knows: a call that asks for the number of GPUs leaves no trace
    return os.waitpid(pid, 0)[1] == 0


def start_workers(plan: Plan, call: Callable[[], Any], dumps: Callable[[Any], bytes] = pickle.dumps) -> list[Any]:
    """Call a function in workers forked from this process, and return their results, which `dumps` pickles."""
    if not end_thread_pools():
        plan = replace(plan, threads=1)  # a worker with more would wait for ever for those of this process
    # Files: a pipe that nobody reads until the end would hold a rank up.
    results = [tempfile.TemporaryFile(prefix="duoka-") for _ in plan.devices]  # noqa: SIM115
    outputs = Outputs(plan.log_dir, range(1, plan.world_size))
    report: list[str] = []
    import duoka.run  # noqa: F401
    from duoka.private.torch import import_compiler

    import_compiler()  # once for all workers: the first optimizer would in each

    try:
        with Signals() as signals, closing(PublishedRun(plan)) as record:
            keep = partial(_keep, call, results, dumps)
            run = RunContext(plan, secrets.token_hex(8), outputs, signals, record, report.append, keep)
            verdict = attempt(run, 0)
        if verdict.code or verdict.why != "well":
            _raise(verdict, results, "".join(report))
        return [_read(file) for file in results]
    finally:
        outputs.close()
        for file in results:
            file.close()


def _keep(call: Callable[[], Any], results: Sequence[IO[bytes]], dumps: Callable[[Any], bytes]) -> None:
    """Call the function in a worker, and pickle its result or its exception."""
    origin = this_process().origin
    assert origin is not None
    file = results[origin.rank]
    try:
        file.write(dumps(call()))
    except Exception as error:
        with suppress(Exception):  # if it cannot be unpickled, `_raise` raises an error with its text
            data = dumps(error)
            pickle.loads(data)
            file.write(data)
        raise  # for the worker's `Ending`
    finally:
        file.flush()


def _read(file: IO[bytes]) -> Any:
    """Read what a worker wrote; None if it ended by `sys.exit(0)`."""
    file.seek(0)
    data = file.read()
    return pickle.loads(data) if data else None


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it raised."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(f"\n\n{text}")


def _raise(verdict: Verdict, results: Sequence[IO[bytes]], report: str) -> None:
    """Raise, in this process, the error that ended the workers; if a signal ended them, raise that signal.

    results: for each rank, the file of its pickled result or exception. report: the message of the error that is
    raised if no worker's exception can be.
    """
    if verdict.why == "stopped":
        if verdict.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        signal.raise_signal(verdict.code - 128)
    first = verdict.culprits[0] if verdict.culprits else None
    if first is not None and first.ending is not None and first.ending.how == "raised":
        error = _read(results[first.rank])
        if isinstance(error, BaseException):
            raise error from RemoteTraceback(f"rank {first.rank}: {first.ending.trace}")
    kind: type[RunError] = WorkerFailed if verdict.stuck is None else TimedOut
    if verdict.why == "left" or (verdict.stuck is not None and verdict.stuck.mismatch is not None):
        kind = RanksApart
    raise kind(report.strip() or f"the workers ended with exit code {verdict.code}")


# A new process.

_START = "from duoka.launchers.function import main; main()"


def call_in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args, dumps)`, or raise its exception, from a process with this one's paths.

    dumps: cloudpickle's, which knows the classes of this program. Raises DeviceError if cloudpickle is missing, or
    something in `args` cannot be pickled; WorkerFailed if the process ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="duoka-") as folder:
        call, result = Path(folder, "call"), Path(folder, "result")
        call.write_bytes(_pickled((function, args)))
        variables = environment.inherited({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        words = [sys.executable, "-c", _START, str(call), str(result), str(os.getpid())]
        with subprocess.Popen(words, env=variables) as process:
            while True:
                try:
                    code = process.wait()
                    break
                except KeyboardInterrupt:  # the process has got the signal, too, and reports it
                    continue
        if not result.exists():
            raise WorkerFailed(f"duoka.launch: the process that starts the workers ended with exit code {code}")
        value, error, cause = pickle.loads(result.read_bytes())
    if error is not None:
        raise error from cause
    return value


def _pickled(call: Any) -> bytes:
    try:
        data: bytes = importlib.import_module("cloudpickle").dumps(call)
    except Exception as error:
        why = "pip install cloudpickle" if isinstance(error, ImportError) else f"it cannot be pickled: {error}"
        raise DeviceError(
            "duoka.launch: this process has used its GPUs already, which do not work after a fork; so the function "
            f"must be taken to a new process ({why}). Or use GPUs only in the function, import duoka before torch is "
            "first asked whether there are some, and restart this program or the notebook's kernel"
        ) from error
    return data


def main() -> None:
    """Be the new process: `call result parent` are its arguments."""
    call, result, parent = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [""]
    dumps = importlib.import_module("cloudpickle").dumps
    function, args = pickle.loads(Path(call).read_bytes())
    value: Any = None
    error: BaseException | None = None
    try:
        value = function(*args, dumps)
    except BaseException as raised:
        error = raised
    disk.replace_by(Path(result), dumps((value, error, error and error.__cause__)))
