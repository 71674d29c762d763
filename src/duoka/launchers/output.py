"""Where the ranks write that do not own the terminal: one log file each."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from duoka.errors import OptionError


class Outputs:
    """The log files of some ranks, in `--log-dir`, or else without a name until they are wanted.

    A file without a name is gone with the processes that hold it open, however they end.

    Raises:
        OptionError: the files cannot be made.
    """

    def __init__(self, log_dir: Path | None, ranks: range) -> None:
        self._log_dir, self._ranks = log_dir, ranks
        self._files: dict[int, IO[bytes]] = {}
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Begin with empty files: those of the first attempt are in the directory itself, the others' below it."""
        self.close()
        self._dir = self._log_dir
        try:
            if self._dir is not None and self._ranks:
                self._dir = self._dir / f"restart{attempt}" if attempt else self._dir
                self._dir.mkdir(parents=True, exist_ok=True)
            for rank in self._ranks:
                self._files[rank] = self._open(rank)
        except OSError as error:
            given = str(self._log_dir) if self._log_dir else None
            raise OptionError("--log-dir", given, "a directory that can be written", str(error)) from None

    def _open(self, rank: int) -> IO[bytes]:
        if self._dir is None:
            return tempfile.TemporaryFile(prefix="duoka-")
        return (self._dir / f"rank{rank}.log").open("w+b")

    def file(self, rank: int) -> IO[bytes] | None:
        """The log file of `rank`; None where it writes to the terminal."""
        return self._files.get(rank)

    def has_any(self) -> bool:
        """Whether there is a rank that does not write to the terminal."""
        return bool(self._files)

    def tail(self, rank: int, lines: int) -> list[str]:
        """The last lines that `rank` wrote to its log file."""
        file = self._files.get(rank)
        if file is None:
            return []
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - 300 * lines)
        text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
        return [line[:300] for line in text.splitlines()[-lines:]]

    def keep(self, more: dict[str, str]) -> Path | None:
        """Let the files outlive the run, with `more` (name → text) beside them.

        Returns where they are; None if there is nothing in them.
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
        except OSError:  # a full disk must not hide what went wrong
            return None
        return self._dir

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
