"""Files of ranks that do not write: what is written is discarded, and positions and sizes are as on rank 0."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from typing import Any


class NullFile(io.FileIO):
    """A file that discards what is written, and keeps the position and size that the file `name` would have."""

    def __init__(self, name: Any, *, size: int = 0, appends: bool = False) -> None:
        super().__init__(os.devnull, "w")
        self.name = name
        self._size = self._at = size
        self._appends = appends

    def write(self, data: Any) -> int:
        """Discard the data, and return its size in bytes."""
        count = memoryview(data).nbytes
        if count:  # writing nothing past the end does not extend a file
            self._at = (self._size if self._appends else self._at) + count
            self._size = max(self._size, self._at)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as in a file."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seekable(self) -> bool:
        """Return True."""
        return True

    def truncate(self, size: int | None = None) -> int:
        """Set the size, as of a file."""
        self._size = self._at if size is None else size
        return self._size


def open_null_file(
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
    """Return a null file, with the arguments of `open` for writing. size: of the file that is appended to."""
    raw = NullFile(name, size=size, appends="a" in mode)
    if "b" in mode:
        return raw if buffering == 0 else io.BufferedWriter(raw)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, newline, line_buffering=buffering == 1)


def of_files_only(original: Callable[..., None], descriptor: Any, *args: Any) -> None:
    """Call `os.fsync` and the like, but not for null files, for which they fail."""
    status = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.stat(os.devnull).st_rdev:
        original(descriptor, *args)
