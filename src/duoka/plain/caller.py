"""Who calls: the script, whose calls all ranks make alike, or something that each rank does for itself."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from duoka.plain.patching import Patches
from duoka.view.collectives import Collectives
from duoka.view.site import is_for_scripts, is_standard, is_users_frame

_OURS = os.path.join(os.path.dirname(__file__), "")


class Caller:
    """Tells the script's own calls from those of libraries, of threads, of reading samples, and of duoka itself.

    To be made in the thread that runs the script. written: files that rank 0 has opened for writing.
    """

    def __init__(self, patches: Patches, ranks: Collectives) -> None:
        self._patches, self._ranks = patches, ranks
        self._thread = threading.get_ident()
        self._busy = False
        self.written: set[str] = set()
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor")
        self.private = ["/dev/", str(Path.home() / ".cache"), inductor]  # what is each process's own, of libraries
        self.temporary: list[str] = []

    def is_private(self, path: str) -> bool:
        """Whether a file is written by a library where it keeps what is this process's own."""
        if self.is_temporary(path):
            return True
        return path.startswith(tuple(self.private)) and (path.startswith("/dev/") or is_librarys(_calling()))

    def is_temporary(self, path: str) -> bool:
        """Whether it lies in a folder that a library has made for this process alone."""
        return path.startswith(tuple(self.temporary))

    def is_free(self) -> bool:
        """Whether this is the main thread of the rank, not inside of such a call already, and all ranks are here."""
        if not self._patches.active or self._busy or self._ranks.alone:
            return False
        return threading.get_ident() == self._thread

    def is_elsewhere(self) -> bool:
        """Whether this is another thread than the one that runs the script, where no rank waits for another."""
        return self._patches.active and threading.get_ident() != self._thread

    def is_inside(self) -> bool:
        """Whether this is the inside of an interception's own work, which each rank does for itself."""
        return self._busy and threading.get_ident() == self._thread

    def is_by_itself(self) -> bool:
        """Whether what runs here, in this process or one that it forked, runs on this rank only."""
        here = self._busy or self._ranks.alone
        return self._patches.by_itself or (here and threading.get_ident() == self._thread)

    def is_script(self) -> bool:
        """Whether the script itself calls, be it through `TemporaryDirectory` or a library that runs its loop."""
        return self.is_free() and not is_librarys(_calling())

    def is_script_itself(self) -> bool:
        """Whether the very next code is the script's."""
        if not self.is_free():
            return False
        frame = _calling()
        return frame is not None and is_users_frame(frame)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this lasts, nested calls are left alone."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def _calling() -> FrameType | None:
    """The innermost frame that is not an interception's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def is_librarys(frame: FrameType | None) -> bool:
    """Whether a library's code calls, looking past Python's own and past those that act for the script."""
    while frame is not None and (is_standard(name := frame.f_code.co_filename) or is_for_scripts(name)):
        frame = frame.f_back
    return frame is None or not is_users_frame(frame)
