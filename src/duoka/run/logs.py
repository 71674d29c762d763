"""Destinations of `run.log`: a class for each, looked up by name in `LOGS`.

A name may be followed by a colon and a path: "csv:out/train.csv".
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import Tensor

from duoka.errors import OptionError
from duoka.origins.process import this_process
from duoka.planning.options import one_of
from duoka.view.tensor.batch import BatchTensor

Value = float | int | str
ARRAYS = (Tensor, np.generic, np.ndarray)


class Logs:
    """All logs of a run, by name and the text after the colon; none on ranks other than 0.

    Raises OptionError if one cannot be opened; those already open are closed.
    """

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        self._logs: list[Log] = []
        with ExitStack() as stack:
            for name, text in names:
                log = LOGS[name](text)
                self._logs.append(log)
                stack.callback(lambda log: log.close(), log)
            self._stack = stack.pop_all()

    def write(self, step: int | None, values: dict[str, Any]) -> None:
        """Write one row of numbers, tensors of one element, or texts, without communication.

        Raises OptionError if a value is of another type, or the step is no whole number, on ranks without logs, too.
        """
        check_step(step)
        check_values(values)
        logged = this_process().logged
        if not self._logs:  # do not let the script wait for a device
            far = {name for name, value in values.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
            values = {} if logged is None else {name: values[name] for name in values if name not in far}
        row = {name: value.item() if isinstance(value, ARRAYS) else value for name, value in values.items()}
        if logged is not None:
            logged(step, row)
        for log in self._logs:
            log.write(step, row)

    def close(self) -> None:
        """Close all logs, even if one fails to close."""
        self._logs = []
        self._stack.close()


def check_step(step: object) -> None:
    """Check that `step` is a whole number or None, not a value passed in its position.

    Raises OptionError if it is of another type.
    """
    if step is not None and not isinstance(step, (int, np.integer)):
        hint = "values are given by their names: run.log(step=3, loss=loss)"
        raise OptionError("run.log(step=...)", type(step).__name__, "a whole number, or left out", hint)


def check_values(values: dict[str, Any]) -> None:
    """Check the types of the values, without reading a tensor's data. Every rank calls this; only rank 0 writes.

    Raises OptionError if one is not a number, a text, or a tensor of one element.
    """
    for name, value in values.items():
        if isinstance(value, BatchTensor):
            raise OptionError(f"run.log({name}=...)", "a whole batch", "a number", f"for example {name}.mean()")
        if isinstance(value, (int, float, str)) or (isinstance(value, ARRAYS) and math.prod(value.shape) == 1):
            continue
        raise OptionError(f"run.log({name}=...)", type(value).__name__, "a number, a text or a tensor of one element")


def check_logs(names: str | Sequence[str]) -> list[tuple[str, str]]:
    """Split each word into a log's name and the text after the colon.

    Raises OptionError if no log has this name, or the log needs a path and none is given.
    """
    logs = []
    for word in [names] if isinstance(names, str) else names:
        name, _, text = str(word).partition(":")
        one_of("log", name, LOGS)
        if LOGS[name].example and not text:
            raise OptionError("log", word, "followed by a path", f"for example: {LOGS[name].example}")
        logs.append((name, text))
    return logs


class Log:
    """A destination for numbers and texts, by name: a file, which is opened with `mode`.

    text: what follows the colon, a path. example: of the full word, where a path is required.
    """

    example = ""
    mode = "a"

    def __init__(self, text: str) -> None:
        self._path = Path(text)
        self._file = _opened(self._path, self.mode)

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        """Write one row. `step` is None if the script gave none."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Console(Log):
    """`console`: one line for each row on standard output: `step 100: loss 0.3421, accuracy 0.9012`."""

    def __init__(self, text: str) -> None: ...

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
        words = ", ".join(f"{name} {text}" for name, text in texts.items())
        print(words if step is None else f"step {step}: {words}", flush=True)

    def close(self) -> None: ...


class JsonLines(Log):
    """`jsonl:PATH`: one JSON object per line, appended to the file. nan and inf, which JSON lacks, become null."""

    example = "jsonl:out/train.jsonl"

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **values}
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()


class Csv(Log):
    """`csv:PATH`: a table, to which rows are appended. A new name adds a column, which is empty in earlier rows."""

    example = "csv:out/train.csv"
    mode = "a+"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._file.seek(0)
        self._columns = next(csv.reader(self._file), [])
        self._file.seek(0, os.SEEK_END)

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        row: dict[str, Value | None] = {"step": step, **values}
        missing = [name for name in row if name not in self._columns]
        if missing:
            self._widen(missing)
        csv.DictWriter(self._file, self._columns, lineterminator="\n").writerow(row)
        self._file.flush()

    def _widen(self, names: list[str]) -> None:
        """Rewrite the table with more columns into a new file, then rename it over the old one."""
        self._file.seek(0)
        rows = list(csv.DictReader(self._file))
        self._file.close()
        self._columns += names
        beside = self._path.with_name(self._path.name + ".new")
        with _opened(beside, "w") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self._path)
        self._file = _opened(self._path, "a+")


LOGS: dict[str, type[Log]] = {"console": Console, "csv": Csv, "jsonl": JsonLines}


def _opened(path: Path, mode: str) -> TextIO:
    """Open a text file, creating its directory if necessary. Raises OptionError if the file cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, mode, encoding="utf-8", newline="")  # type: ignore[return-value]
    except OSError as error:
        raise OptionError("log", path, "a file that can be written", error.strerror or str(error)) from None
