"""Log files of the ranks that do not write to the terminal."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from duoka.errors import OptionError


class Outputs:
    """The log files of some ranks: in `--log-dir`, else unnamed temporary files, named when something must be kept.

    An unnamed file disappears with the processes that have it open.

    Raises:
        OptionError: the files cannot be created.
    """

    def __init__(self, log_dir: Path | None, ranks: range) -> None:
        self._log_dir, self._ranks = log_dir, ranks
        self._files: dict[int, IO[bytes]] = {}
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Open empty files for an attempt: in `--log-dir` for the first, in its folder restartN for the others."""
        self.close()
        self._dir = self._log_dir
        try:
            if self._dir is not None and self._ranks:
                self._dir = self._dir / f"restart{attempt}" if attempt else self._dir
                self._dir.mkdir(parents=True, exist_ok=True)
            for rank in self._ranks:
                self._files[rank] = self._open(rank)
        except OSError as error:
            folder = str(self._log_dir) if self._log_dir else None
            raise OptionError("--log-dir", folder, "a directory that can be written", str(error)) from None

    def _open(self, rank: int) -> IO[bytes]:
        if self._dir is None:
            return tempfile.TemporaryFile(prefix="duoka-")
        return (self._dir / f"rank{rank}.log").open("w+b")

    def file(self, rank: int) -> IO[bytes] | None:
        """Return the log file of `rank`; None if it writes to the terminal."""
        return self._files.get(rank)

    def has_any(self) -> bool:
        """Return whether any rank has a log file."""
        return bool(self._files)

    def tail(self, rank: int, lines: int) -> list[str]:
        """Return the last lines of the log file of `rank`."""
        file = self._files.get(rank)
        if file is None:
            return []
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - 300 * lines)
        text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
        return [line[:300] for line in text.splitlines()[-lines:]]

    def keep(self, more: dict[str, str]) -> Path | None:
        """Keep the log files after the run, and write `more` (name → text) beside them.

        Returns their folder; None if there is nothing to keep.
        """
        written = {rank: file for rank, file in self._files.items() if os.fstat(file.fileno()).st_size}
        if not written and not more:
            return None
        try:
            if self._dir is None:
                self._dir = Path(tempfile.mkdtemp(prefix="duoka-"))
                for rank, file in written.items():
                    file.seek(0)
                    with (self._dir / f"rank{rank}.log").open("wb") as kept:
                        shutil.copyfileobj(file, kept)
            for name, text in more.items():
                (self._dir / name).write_text(text)
        except OSError:  # a full disk must not hide the error of the run
            return None
        return self._dir

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
