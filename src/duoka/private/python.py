"""Private parts of Python and multiprocessing: what for, and what is public instead, if anything."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pathlib
import platform
import random
import sys
import threading
import weakref
from multiprocessing import resource_sharer
from typing import IO, Any

from duoka.private.lookup import parts_of

with parts_of("Python", platform.python_version()):
    # How names of Python 2 in old pickles are told today. Public: none, but pickle's own loading, which runs them.
    from _compat_pickle import IMPORT_MAPPING as IMPORT_MAPPING
    from _compat_pickle import NAME_MAPPING as NAME_MAPPING

    # The end of a worker does what that of the interpreter does, without tearing down torch and CUDA. Public: none,
    # but sys.exit(), which tears down.
    join_threads: Any = threading._shutdown  # type: ignore[attr-defined]
    run_exit_functions: Any = atexit._run_exitfuncs
    # Of the program that a worker was forked from. Public: atexit.unregister, for each that is known.
    forget_exit_functions: Any = atexit._clear
    _finalizers: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]

    # (where, name): the source of SystemRandom and secrets. Public: os.urandom, which `random` has taken before.
    SYSTEMS_BYTES = (random, "_urandom")
    assert callable(random._urandom)  # type: ignore[attr-defined]

    assert isinstance(multiprocessing.current_process()._config, dict)  # type: ignore[attr-defined]
    assert resource_sharer.sys is sys  # type: ignore[attr-defined]


def put_sockets_into(folder: str) -> None:
    """multiprocessing makes its sockets there from now on. Public: none; it makes a folder in tempfile.tempdir."""
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def show_sharers_errors_by(instead_of_sys: Any) -> None:
    """What goes wrong while multiprocessing hands out memory goes to the `excepthook` of this. Public: none."""
    resource_sharer.sys = instead_of_sys  # type: ignore[attr-defined]


def update_paths() -> None:
    """Let pathlib call the functions of `os` that are there now: Python 3.10 has its own copies. Public: none."""
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if accessor is not None:
        links = ("link", "readlink", "symlink", "unlink")
        for name in ("chmod", "listdir", "mkdir", "rename", "replace", "rmdir", "scandir", "stat", *links):
            setattr(accessor, name, staticmethod(getattr(os, name)))
        accessor.open = staticmethod(io.open)


def keep_from_exit(function: Any) -> None:
    """`weakref.finalize(…, function)` is not run at exit, whoever made it. Public: `atexit` of one that is known."""
    for finalizer, info in list(_finalizers.items()):
        if info.func is function:
            finalizer.atexit = False


def unchecked(stream: IO[bytes]) -> IO[bytes]:
    """A file of a zip archive, to be read without a look at its checksum. Public: none."""
    stream._expected_crc = None  # type: ignore[attr-defined]
    return stream
