"""Files that keep nothing: what the ranks write into that do not write."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any


class Nowhere(io.FileIO):
    """Takes what is written, and tells where in the file of `name` it would be."""

    def __init__(self, name: Any, *, size: int = 0, appends: bool = False) -> None:
        super().__init__(os.devnull, "w")
        self.name = name
        self._size = self._at = size
        self._appends = appends

    def write(self, data: Any) -> int:
        """All of it, at once."""
        count = memoryview(data).nbytes
        if count:  # nothing, written past the end, does not make a file longer
            self._at = (self._size if self._appends else self._at) + count
            self._size = max(self._size, self._at)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As in a file."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """As in a file."""
        return self._at

    def seekable(self) -> bool:
        """As a file."""
        return True

    def truncate(self, size: int | None = None) -> int:
        """As a file."""
        self._size = self._at if size is None else size
        return self._size


def nowhere(
    name: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    *,
    size: int = 0,
) -> Any:
    """What `open` gives for writing alone, with the arguments of `open`. size: of the file that is added to."""
    raw = Nowhere(name, size=size, appends="a" in mode)
    if "b" in mode:
        return raw if buffering == 0 else io.BufferedWriter(raw)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, newline, line_buffering=buffering == 1)


def of_files_only(original: Callable[..., None]) -> Callable[..., None]:
    """`os.fsync` and the like, which the device that stands for a file refuses."""

    def changed(descriptor: Any, *args: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if not _is_null(number):
            original(descriptor, *args)

    return changed


def _is_null(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
