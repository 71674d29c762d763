"""A process that has imported torch once, and forks each run of a test from that state.

    pytest's workers  ──request, with its files──►  this server  ──fork──►  keeper  ──fork──►  the run itself

It computes nothing itself, so that what it forks is as good as a new interpreter. The keeper adopts what the run
leaves behind, ends it, and reports; if nobody is left to read the report, it ends the run. The run ends as any
program does, at the end of this file, but for taking its modules down.

Started by `tests.flows.flow` as `python warm.py SOCKET`; with the word cuda or npu, what it forks has such cards.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "PIL.Image",
    "numpy",
    "scipy.io",
    "scipy.stats",  # nearly all that sklearn.datasets takes; sklearn itself is imported by the scripts
    "torch",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",  # of torch.compile(backend="eager")
    "torch.distributed",
    "torch.nn.functional",
    "torch.utils.data",
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MADV_COLLAPSE, HUGE_PAGE = 25, 1 << 21  # since Linux 6.1; an older one refuses, and forks take longer


def serve(listener: socket.socket) -> dict[str, Any]:
    """Answer requests for ever; returns only in the runs that it forks, with what they are to be."""
    select.select([listener], [], [])  # until a test needs this process
    for kind in sys.argv[2:]:
        _simulate_cards(kind)
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need nobody to wait for them
    connections = [listener]
    while True:
        for connection in select.select(connections, [], [])[0]:
            if connection is listener:
                connections.append(listener.accept()[0])
                continue
            request, files, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            if not request:
                connections.remove(connection)
                connection.close()
                continue
            if os.fork() == 0:
                for one in connections:
                    one.close()
                return keep(json.loads(request), *files)
            for file in files:
                os.close(file)


def keep(request: dict[str, Any], stdin: int, stdout: int, stderr: int, report: int) -> dict[str, Any]:
    """Be the keeper of one run; returns only in the run itself."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    run = os.fork()
    if run == 0:
        _die_with_parent()
        os.setpgid(0, 0)
        os.close(report)
        _use_as_standard(stdin, stdout, stderr)
        return request
    for file in (stdin, stdout, stderr):
        os.close(file)
    _tell(report, pid=run)
    status = _wait(run, request["timeout"], report)
    timed_out = status is None
    if status is None:
        os.kill(run, signal.SIGKILL)
        status = os.waitpid(run, 0)[1]
    left_behind = _clear(0 if timed_out else request["grace"])
    _tell(report, returncode=_as_the_shell_sees(status), timed_out=timed_out, left_behind=left_behind)
    os._exit(0)


def _use_as_standard(*files: int) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def _wait(pid: int, timeout: float, report: int) -> int | None:
    """The child's wait status, or None if it does not end in time, or while somebody reads the report."""
    deadline = time.monotonic() + timeout
    unread = select.poll()
    unread.register(report, 0)
    while time.monotonic() < deadline and not unread.poll(5):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
    return None


def _clear(grace: float) -> list[str]:
    """Give what is left some time to end, then end it; returns what had to be ended."""
    deadline = time.monotonic() + grace
    left: dict[int, str] = {}
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return list(left.values())
        if not found and time.monotonic() >= deadline:
            for pid in _children():
                left.setdefault(pid, _command_line(pid))
                os.kill(pid, signal.SIGKILL)  # what it has started comes to us, and is ended in the next round
        if not found:
            time.sleep(0.005)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _command_line(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return f"{pid}: {file.read().replace(bytes(1), b' ').decode(errors='replace').strip()}"


def _as_the_shell_sees(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(report: int, **what: Any) -> None:
    with suppress(BrokenPipeError):
        os.write(report, json.dumps(what).encode() + b"\n")


def _simulate_cards(kind: str) -> None:
    """Have cards as a new interpreter with these variables has them."""
    sys.path.insert(1, os.fspath(Path(__file__).parents[2]))
    from tests.simulated import SITE, variables

    os.environ.update(variables(kind=kind))
    runpy.run_path(os.fspath(SITE / "sitecustomize.py"))
    del sys.path[1]


def preload() -> None:
    """Import what runs need, duoka included; none of it may start a thread of Python's or compute."""
    import duoka

    for module in pkgutil.walk_packages(duoka.__path__, "duoka."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in PRELOADED:
        importlib.import_module(name)
    _mute_gloo()
    make_forks_cheap()
    assert threading.active_count() == 1, threading.enumerate()


def make_forks_cheap() -> None:
    """Spare each of the thousands of forks most of its time: 60 of the 90 ms that `duoka --version` takes.

    Memory in huge pages has fewer page-table entries to copy; if objects are not collected, and torch's operators not
    unregistered at the end, fewer pages are written to, and so copied.
    """
    from duoka.private.python import skip_at_exit
    from duoka.private.torch import TAKE_DOWN

    skip_at_exit(getattr(*TAKE_DOWN))
    gc.freeze()
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for region, access, _, _, _, *name in maps:
        begin, end = (int(address, 16) & -HUGE_PAGE for address in region.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]) and end > begin:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin + HUGE_PAGE), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _mute_gloo() -> None:
    """Keep what gloo of torch 2.10 says of a script's own groups out of standard output: ranks mix their lines."""
    from torch.distributed import distributed_c10d

    from duoka.private.torch import without_gloo_messages

    if not isinstance(without_gloo_messages(), nullcontext):

        class Quiet(distributed_c10d.ProcessGroupGloo):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                with without_gloo_messages():
                    super().__init__(*args, **kwargs)

        distributed_c10d.ProcessGroupGloo = Quiet  # type: ignore[misc]


def become(request: dict[str, Any]) -> int:
    """Be the program that is asked for, in the folder and with the variables that are asked for."""
    import numpy
    import torch

    numpy.random.seed()  # a new interpreter has states of its own; Python's `random` sees to it itself
    torch.default_generator.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background are started to ignore it
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    tempfile.tempdir = None  # found anew: TMPDIR may be another
    exec(request["prepare"], {})
    if request["program"] == "python":
        return python(*request["args"])
    from duoka.cli import main

    sys.argv = ["duoka", *request["args"]]
    return main()


def python(script: str, *args: str) -> int:
    """Run a script as `python script.py` does."""
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=os.path.abspath(script), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    show, here = sys.excepthook, __file__  # Python 3.14 has taken the name away when the hook is called

    def show_from_script(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == here:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_from_script
    with open(script, "rb") as file:
        exec(compile(file.read(), main.__dict__["__file__"], "exec", dont_inherit=True), main.__dict__)
    return 0


def lived(request: dict[str, Any]) -> int:
    """Be the program, show what it raised as the interpreter does, and return its exit code."""
    try:
        return become(request)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error  # type: ignore[attr-defined]  # since Python 3.12
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
    return 1


def end(code: int) -> None:
    """End as the interpreter does, but for taking all modules down, which takes most of the time."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _die_with_parent()
    end(lived(serve(socket.socket(fileno=int(sys.argv[1])))))
