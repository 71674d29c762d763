"""`csv:PATH`: a table with a column for every name, added to what is there."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from duoka.logs.base import Log, Value
from duoka.logs.files import opened


class Csv(Log):
    """A name that comes later becomes a column of the whole table, empty above."""

    def __init__(self, place: str) -> None:
        self._path = Path(place)
        self._file = opened(place, "a+")
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
        """Write the table anew with more columns, beside the old one, which it then replaces."""
        self._file.seek(0)
        rows = list(csv.DictReader(self._file))
        self._file.close()
        self._columns += names
        beside = self._path.with_name(self._path.name + ".new")
        with opened(str(beside), "w") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self._path)
        self._file = opened(str(self._path), "a+")

    def close(self, failed: bool) -> None:
        self._file.close()
