"""Private parts of Python and multiprocessing: their purpose, and the public alternative, if any."""

from __future__ import annotations

import atexit
import glob
import io
import multiprocessing
import os
import pathlib
import platform
import random
import sys
import tarfile
import threading
import warnings
import weakref
from multiprocessing import resource_sharer
from typing import IO, Any

from duoka.private import requiring

with requiring("Python", platform.python_version()):
    # Today's names for those of Python 2 in old pickles. Public: none; pickle's own loading executes code.
    from _compat_pickle import IMPORT_MAPPING as IMPORT_MAPPING
    from _compat_pickle import NAME_MAPPING as NAME_MAPPING

    # Steps of the interpreter's exit, which a worker takes without tearing down torch and the GPU. Public: none,
    # but sys.exit(), which tears down.
    join_threads: Any = threading._shutdown  # type: ignore[attr-defined]
    run_exit_functions: Any = atexit._run_exitfuncs
    # Removes the atexit functions of the forking program. Public: atexit.unregister, for each known one.
    forget_exit_functions: Any = atexit._clear
    _finalizers: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]

    # (owner, name): the source of SystemRandom and secrets. Public: os.urandom, of which `random` keeps a copy.
    SYSTEMS_BYTES = (random, "_urandom")
    assert callable(random._urandom)  # type: ignore[attr-defined]

    # (owner, name): called to show a warning. Public: warnings.showwarning, which catch_warnings() restores.
    SHOW_WARNING = (warnings, "_showwarnmsg")
    assert callable(warnings._showwarnmsg)  # type: ignore[attr-defined]

    # The class in which pathlib of Python 3.10 keeps copies of functions of `os` and `io`; None: no copies.
    # Public: none.
    PATH_FUNCTIONS: Any = getattr(pathlib, "_NormalAccessor", None)
    # The class in which glob, since Python 3.13, keeps copies of functions of `os`; None: no copies. Public: none.
    GLOB_FUNCTIONS: Any = getattr(glob, "_StringGlobber", None)
    # (module, name): the copy of `open` that it keeps. Public: none.
    OPEN_COPIES = (("bz2", "_builtin_open"), ("tarfile", "bltn_open"))
    assert callable(tarfile.bltn_open)  # type: ignore[attr-defined]

    assert isinstance(multiprocessing.current_process()._config, dict)  # type: ignore[attr-defined]
    assert resource_sharer.sys is sys  # type: ignore[attr-defined]


def set_socket_folder(folder: str) -> None:
    """Let multiprocessing create its sockets in this folder. Public: none; its default is in tempfile.tempdir."""
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def set_resource_sharer_sys(instead_of_sys: Any) -> None:
    """Let multiprocessing report errors while it shares memory to the `excepthook` of this. Public: none."""
    resource_sharer.sys = instead_of_sys  # type: ignore[attr-defined]


def update_paths() -> None:
    """Let Python's modules call the current `open` and functions of `os`, of which they keep copies. Public: none."""
    for module, name in OPEN_COPIES:
        if module in sys.modules:  # else it will take the current one when it is imported
            setattr(sys.modules[module], name, io.open)
    for name in ("lstat", "scandir") if GLOB_FUNCTIONS is not None else ():
        setattr(GLOB_FUNCTIONS, name, staticmethod(getattr(os, name)))
    if PATH_FUNCTIONS is not None:
        links = ("link", "readlink", "symlink", "unlink")
        for name in ("chmod", "listdir", "mkdir", "rename", "replace", "rmdir", "scandir", "stat", *links):
            setattr(PATH_FUNCTIONS, name, staticmethod(getattr(os, name)))
        PATH_FUNCTIONS.open = staticmethod(io.open)


def skip_at_exit(function: Any) -> None:
    """Do not run `weakref.finalize(…, function)` at exit. Public: `atexit` of a known finalizer."""
    for finalizer, info in _finalizers.copy().items():  # a list of them may collect garbage, and with it some
        if info.func is function:
            finalizer.atexit = False


def without_checksum(stream: IO[bytes]) -> IO[bytes]:
    """Read a member of a zip archive without checking its checksum. Public: none."""
    stream._expected_crc = None  # type: ignore[attr-defined]
    return stream
