"""`csv:PATH`: a CSV table with one column for each name. Rows are appended to an existing file."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from duoka.logs.base import Log, Value
from duoka.logs.files import opened


class Csv(Log):
    """A CSV log. A name first logged later adds a column, which is empty in earlier rows."""

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
        """Rewrite the table with more columns into a new file, then rename it over the old one."""
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
