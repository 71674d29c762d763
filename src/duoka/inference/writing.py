"""Write predictions to `NAME.part`, which is renamed when complete and can be resumed.

`NAME.part.json` records the progress, always after the outputs themselves are written.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from duoka.errors import OptionError, RunError

BETWEEN_NOTES = 1.0  # seconds between two records of the progress


class Writer(ABC):
    """Writes outputs of items 0, 1, 2, … of `total`. done: number written.

    facts: values that must be unchanged to resume: the model, its weights, the data.

    Raises:
        OptionError: the file exists already, or the unfinished part was made with other facts.
    """

    def __init__(self, path: Path, total: int, facts: Mapping[str, Any], resume: bool) -> None:
        self.path, self.total, self.facts = path, total, {**facts, "total": total}
        self.part, self.note = Path(f"{path}.part"), Path(f"{path}.part.json")
        self.done = 0
        self._noted = time.monotonic()
        if path.exists():
            raise OptionError("--out", str(path), "a new file; remove it, or choose another name")
        if self.note.exists() and self.part.exists():
            self._resume(json.loads(self.note.read_text()), resume)
        elif not path.absolute().parent.is_dir():
            raise OptionError("--out", str(path), "a file in an existing folder")
        elif not os.access(path.absolute().parent, os.W_OK):
            raise OptionError("--out", str(path), "a file in a writable folder")

    def _resume(self, noted: Mapping[str, Any], resume: bool) -> None:
        done = noted.get("done", 0)
        if not resume:
            hint = f"{done:,} of {noted['facts']['total']:,} are in {self.part}: go on with --resume, or remove both"
            raise OptionError("--out", str(self.path), "a file without an unfinished part", hint)
        changed = [name for name, fact in self.facts.items() if noted["facts"].get(name) != fact]
        if changed:
            raise OptionError(
                "--resume", str(self.part), f"made of the same {', '.join(changed)}", "remove it to begin anew"
            )
        self.done = done
        self._reopen(noted)

    def write(self, outputs: Sequence[Any]) -> None:
        """Write the outputs of the next items.

        Raises:
            RunError: the disk is full, or fails.
        """
        try:
            self._append(outputs)
        except OSError as error:
            raise RunError(f"{self.part} cannot be written: {error.strerror or error}") from error
        self.done += len(outputs)
        if time.monotonic() - self._noted > BETWEEN_NOTES:
            self.save()

    def save(self) -> None:
        """Flush the outputs to the disk, and record the progress."""
        where = self._flush()
        beside = Path(f"{self.note}.new")
        with beside.open("w") as file:
            json.dump({"done": self.done, "facts": self.facts, **where}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.note)
        self._noted = time.monotonic()

    def keep(self) -> None:
        """Keep the unfinished file, to be resumed."""
        if self.done:
            self.save()

    def finish(self) -> None:
        """Rename the complete file to its final name."""
        self.save()
        self.close()
        os.replace(self.part, self.path)
        self.note.unlink()

    @abstractmethod
    def _reopen(self, noted: Mapping[str, Any]) -> None:
        """Open the unfinished file."""

    @abstractmethod
    def _append(self, outputs: Sequence[Any]) -> None:
        """Append outputs."""

    @abstractmethod
    def _flush(self) -> dict[str, Any]:
        """Flush to the disk; returns values that `_reopen` needs."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. Further calls do nothing."""


class NpyWriter(Writer):
    """Writes a .npy file: one array with a row for each item."""

    _rows: Any = None

    def _reopen(self, noted: Mapping[str, Any]) -> None:
        if self.done:
            self._rows = numpy.lib.format.open_memmap(self.part, mode="r+")

    def _append(self, outputs: Sequence[Any]) -> None:
        for place, output in enumerate(outputs, self.done):
            row = _array(output, self.path)
            if self._rows is None:
                self._rows = self._begin(row)
            if row.shape != self._rows.shape[1:]:
                shapes = f"item {place:,} gives {row.shape} after {self._rows.shape[1:]}"
                raise OptionError("--out", str(self.path), f"a .jsonl file, as outputs differ in shape: {shapes}")
            self._rows[place] = row

    def _begin(self, row: Any) -> Any:
        """Create the file at full size: with a memory map, a disk full later would kill the process by SIGBUS."""
        shape = (self.total, *row.shape)
        rows = numpy.lib.format.open_memmap(self.part, mode="w+", dtype=row.dtype, shape=shape)
        with self.part.open("r+b") as file, suppress(AttributeError):  # not on every system
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return rows

    def _flush(self) -> dict[str, Any]:
        if self._rows is not None:
            self._rows.flush()
        return {}

    def close(self) -> None:
        self._rows = None


class JsonlWriter(Writer):
    """Writes a line of JSON for each item: {"index": 0, "output": ...}."""

    _file: Any = None

    def _reopen(self, noted: Mapping[str, Any]) -> None:
        self._file = self.part.open("r+")
        self._file.truncate(noted["bytes"])
        self._file.seek(noted["bytes"])

    def _append(self, outputs: Sequence[Any]) -> None:
        self._file = self._file or self.part.open("w")
        for place, output in enumerate(outputs, self.done):
            self._file.write(json.dumps({"index": place, "output": _plain(output)}) + "\n")

    def _flush(self) -> dict[str, Any]:
        self._file = self._file or self.part.open("w")
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


WRITERS: dict[str, type[Writer]] = {".jsonl": JsonlWriter, ".npy": NpyWriter}


def writer(path: Path, total: int, facts: Mapping[str, Any], resume: bool) -> Writer:
    """Create the writer for `path`, by its suffix.

    Raises:
        OptionError: the suffix is unknown, or the file cannot be created or resumed.
    """
    if path.suffix not in WRITERS:
        raise OptionError("--out", str(path), f"a name that ends in {' or '.join(WRITERS)}")
    return WRITERS[path.suffix](path, total, facts, resume)


def _array(output: Any, path: Path) -> Any:
    if isinstance(output, torch.Tensor):
        return (output.float() if output.dtype is torch.bfloat16 else output).numpy()
    if isinstance(output, (int, float)):
        return numpy.asarray(output)
    raise OptionError("--out", str(path), f"a .jsonl file, as an output is a {type(output).__name__}")


def _plain(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.tolist()
    if isinstance(output, Mapping):
        return {str(key): _plain(value) for key, value in output.items()}
    return [_plain(value) for value in output] if isinstance(output, (tuple, list)) else output
