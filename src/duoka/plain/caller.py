"""Distinguish calls of the script, which all ranks make, from calls that each rank makes for itself."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from filelock import BaseFileLock  # which torch depends on

from duoka.collectives.base import Collectives
from duoka.plain.patching import Patches
from duoka.plain.shared_random import place_of
from duoka.system.user_code import is_standard, is_users_frame

_OURS = os.path.join(os.path.dirname(__file__), "")


class _Here(threading.local):
    """What holds in one thread."""

    nested = False  # inside an intercepted call


_SCRIPT, _LIBRARY = "script", "library"
# Packages in which ranks need not go together: they keep caches of a process and locks of their own, or (W&B) are
# disabled on other ranks.
_APART = ("duoka", "torch", "triton", "wandb")
_TOGETHER = ("torch.hub", "torch.distributed.checkpoint")  # which write where the script tells them to


class Caller:
    """Distinguishes calls that all ranks make from those of threads, of reading samples, and of duoka.

    Create it in the thread that runs the script.
    """

    def __init__(self, patches: Patches, ranks: Collectives) -> None:
        self._patches, self._ranks = patches, ranks
        self._thread = threading.get_ident()
        self._here = _Here()
        self._collecting = False  # True while Python collects garbage, which each rank does at other times
        self.at_end = False  # the script has ended
        self.written: set[str] = set()  # files that rank 0 has opened for writing
        self._changed: set[str] = set()  # paths
        self._folders: set[str] = set()  # of these
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor")
        self.private = ["/dev/", str(Path.home() / ".cache"), inductor]  # where libraries keep files of each process
        self.temporary: list[str] = []
        self.own_files: set[str] = set()  # temporary ones that libraries have created for this process
        self.locks: WeakKeyDictionary[BaseFileLock, int] = WeakKeyDictionary()  # that libraries hold -> thread
        gc.callbacks.append(self._collect)
        patches.at_end(lambda: gc.callbacks.remove(self._collect))

    def _collect(self, phase: str, info: object) -> None:
        if threading.get_ident() == self._thread:
            self._collecting = phase == "start"

    def is_private(self, path: str) -> bool:
        """Return whether a library writes this file to a place that belongs to this process."""
        if self.is_temporary(path):
            return True
        return path.startswith(tuple(self.private)) and (path.startswith("/dev/") or _kind(_calling()) != _SCRIPT)

    def is_temporary(self, path: str) -> bool:
        """Return whether a path is a file, or in a folder, that a library has created for this process."""
        return path in self.own_files or path.startswith(tuple(self.temporary))

    def write(self, path: str) -> None:
        """Note that rank 0 has opened the file at this path for writing."""
        self.written.add(path)
        self.change([path])

    def change(self, paths: Iterable[str]) -> None:
        """Note that all ranks know of changes at these paths."""
        self._changed.update(paths)
        self._folders.update(map(os.path.dirname, paths))

    def has_changed(self, path: str) -> bool:
        """Return whether a path, something in it, or a folder above it was changed."""
        if path in self._folders:
            return True
        while path not in self._changed:
            above = os.path.dirname(path)
            if above == path:
                return False
            path = above
        return True

    def is_apart(self) -> bool:
        """Return whether a library holds a file lock: it synchronizes processes itself, and ranks must not wait.

        Other threads may work for the one that holds it.
        """
        here = threading.get_ident()
        return bool(self.locks) and (here != self._thread or here in self.locks.values())

    def may_communicate(self) -> bool:
        """Return whether ranks may communicate here: main thread, no rank-local work, not in an intercepted call.

        The garbage collector runs at other times on each rank.
        """
        if (
            not self._patches.active
            or self._here.nested
            or self._ranks.isolated
            or self._collecting
            or self.is_apart()
        ):
            return False
        return threading.get_ident() == self._thread

    def is_other_thread(self) -> bool:
        """Return whether this is another thread than the script's, in which ranks must not wait for each other."""
        return self._patches.active and threading.get_ident() != self._thread

    def is_unordered(self) -> bool:
        """Return whether all ranks make this call, but each at a time of its own: in a thread, at exit."""
        if not self._patches.active or self.is_rank_local() or self.is_apart():
            return False
        kind = _kind(_calling())
        late = self.is_other_thread() or self._collecting or (self.at_end and kind == _LIBRARY)
        return late and kind is not None

    def is_nested(self) -> bool:
        """Return whether this is inside an intercepted call, whose nested calls are not intercepted."""
        return self._here.nested

    def is_rank_local(self) -> bool:
        """Return whether this code runs on this rank only, in this process or one that it forked."""
        local = self._ranks.isolated and threading.get_ident() == self._thread
        return self._patches.rank_local or self._here.nested or local

    def is_script_call(self, through: str = "") -> bool:
        """Return whether the script calls, possibly through Python's library and the package `through`."""
        return self.may_communicate() and _kind(_calling(), through) == _SCRIPT

    def is_joint(self) -> bool:
        """Return whether all ranks make this call together.

        Calls of the script must be, otherwise the ranks have gone apart. A library may make one on some ranks only:
        then no rank waits for the others.
        """
        if not self.may_communicate():
            return False
        frame = _calling()
        kind = _kind(frame)
        if kind == _LIBRARY and frame is not None and not self.at_end:
            return self._ranks.meet(place_of(frame))
        return kind == _SCRIPT

    def asks_together(self, path: str | bytes | os.PathLike[Any]) -> bool:
        """Return whether ranks must agree on what is at this path.

        The script may wait for other programs there; for libraries, ranks find the same unless the run changes it.
        """
        if not self.may_communicate() or self.is_temporary(where := os.path.abspath(os.fsdecode(path))):
            return False
        return _kind(_calling()) == _SCRIPT or self.has_changed(where)

    def shares_temporary(self, folder: Any) -> bool:
        """Return whether a temporary file or folder in `folder` is one for all ranks.

        One that a library makes in the system's folder is this process's own, and so is shared memory.
        """
        if folder is not None and self.is_private(os.path.abspath(os.fsdecode(folder))):
            return False
        return self.is_script_call() or (folder is not None and self.is_joint())

    def common_frame(self) -> FrameType | None:
        """Return the frame that calls; None if not all ranks run this code."""
        if not self.may_communicate():
            return None
        frame = _calling()
        kind = _kind(frame)
        return None if kind is None or (kind == _LIBRARY and self.at_end) else frame

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Within the context, do not intercept nested calls."""
        before, self._here.nested = self._here.nested, True
        try:
            yield
        finally:
            self._here.nested = before


def _calling() -> FrameType | None:
    """Return the innermost frame that is not an interception's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _kind(frame: FrameType | None, through: str = "") -> str | None:
    """Return whether the script or a library calls, possibly through Python's; None for code of one rank."""
    while frame is not None and (is_standard(frame.f_code.co_filename) or _package(frame) == through):
        frame = frame.f_back
    if frame is None:
        return None
    if is_users_frame(frame):
        return _SCRIPT
    apart = _package(frame) in _APART and not frame.f_globals["__name__"].startswith(_TOGETHER)
    return None if apart else _LIBRARY


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__") or "?"
    return name.partition(".")[0]
