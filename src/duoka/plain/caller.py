"""Distinguish calls of the script, which all ranks make, from calls that each rank makes for itself."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from weakref import WeakSet

from filelock import BaseFileLock  # which torch depends on

from duoka.plain.patching import Patches
from duoka.system.code_files import is_for_scripts, is_standard
from duoka.view.collectives.base import Collectives
from duoka.view.support.user_code import is_users_frame

_OURS = os.path.join(os.path.dirname(__file__), "")


class Caller:
    """Distinguishes the script's own calls from those of libraries, of threads, of reading samples, and of duoka.

    Create it in the thread that runs the script. written: files that rank 0 has opened for writing.
    """

    def __init__(self, patches: Patches, ranks: Collectives) -> None:
        self._patches, self._ranks = patches, ranks
        self._thread = threading.get_ident()
        self._nested = False
        self.written: set[str] = set()
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor")
        self.private = ["/dev/", str(Path.home() / ".cache"), inductor]  # where libraries keep files of each process
        self.temporary: list[str] = []
        self.own_files: set[str] = set()  # temporary ones that libraries have created for this process
        self.locks: WeakSet[BaseFileLock] = WeakSet()  # that libraries hold

    def is_private(self, path: str) -> bool:
        """Return whether a library writes this file to a place that belongs to this process."""
        if self.is_temporary(path):
            return True
        return path.startswith(tuple(self.private)) and (path.startswith("/dev/") or is_library_frame(_calling()))

    def is_temporary(self, path: str) -> bool:
        """Return whether a path is a file, or in a folder, that a library has created for this process."""
        return path in self.own_files or path.startswith(tuple(self.temporary))

    def is_apart(self) -> bool:
        """Return whether a library holds a file lock: it synchronizes processes itself, and ranks must not wait."""
        return bool(self.locks)

    def may_communicate(self) -> bool:
        """Return whether ranks may communicate here: main thread, no rank-local work, not in an intercepted call."""
        if not self._patches.active or self._nested or self._ranks.rank_local or self.is_apart():
            return False
        return threading.get_ident() == self._thread

    def is_other_thread(self) -> bool:
        """Return whether this is another thread than the script's, in which ranks must not wait for each other."""
        return self._patches.active and threading.get_ident() != self._thread

    def is_nested(self) -> bool:
        """Return whether this is inside an intercepted call, whose nested calls are not intercepted."""
        return self._nested and threading.get_ident() == self._thread

    def is_rank_local(self) -> bool:
        """Return whether this code runs on this rank only, in this process or one that it forked."""
        here = self._nested or self._ranks.rank_local
        return self._patches.rank_local or (here and threading.get_ident() == self._thread)

    def is_script_call(self) -> bool:
        """Return whether the script calls, possibly through Python's library or one that runs its loop."""
        return self.may_communicate() and not is_library_frame(_calling())

    def is_direct_script_call(self) -> bool:
        """Return whether the script calls directly."""
        if not self.may_communicate():
            return False
        frame = _calling()
        return frame is not None and is_users_frame(frame)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Within the context, do not intercept nested calls."""
        self._nested = True
        try:
            yield
        finally:
            self._nested = False


def _calling() -> FrameType | None:
    """Return the innermost frame that is not an interception's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def is_library_frame(frame: FrameType | None) -> bool:
    """Return whether a library calls. Frames of Python, and of libraries that act for the script, are skipped."""
    while frame is not None and (is_standard(name := frame.f_code.co_filename) or is_for_scripts(name)):
        frame = frame.f_back
    return frame is None or not is_users_frame(frame)
