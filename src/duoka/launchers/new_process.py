"""Call a function in a new Python process, for a program that has used GPUs: its forks cannot use them."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duoka import environment
from duoka.errors import DeviceError, WorkerFailed
from duoka.system.libc import die_with

_START = "from duoka.launchers.new_process import main; main()"


def call_in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args, dumps)`, or raise its exception, from a process with this one's paths.

    dumps: cloudpickle's, which knows the classes of this program.

    Raises:
        DeviceError: cloudpickle is missing, or something in `args` cannot be pickled.
        WorkerFailed: the process ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="duoka-") as folder:
        given, result = Path(folder, "call"), Path(folder, "result")
        given.write_bytes(_pickled((function, args)))
        environs = environment.inherited({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        words = [sys.executable, "-c", _START, str(given), str(result), str(os.getpid())]
        with subprocess.Popen(words, env=environs) as process:
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
    """Be the new process: `given result parent` are its arguments."""
    given, result, parent = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [""]
    dumps = importlib.import_module("cloudpickle").dumps
    function, args = pickle.loads(Path(given).read_bytes())
    value: Any = None
    error: BaseException | None = None
    try:
        value = function(*args, dumps)
    except BaseException as raised:
        error = raised
    partial = Path(f"{result}.partial")
    cause = None if error is None else error.__cause__
    partial.write_bytes(dumps((value, error, cause)))
    partial.rename(result)
