"""`jsonl:PATH`: one JSON object per line, appended to an existing file."""

from __future__ import annotations

import json
import math
import time

from duoka.logs.base import Log, Value
from duoka.logs.files import opened


class JsonLines(Log):
    """A JSON Lines log. Each line is flushed at once. nan and inf, which JSON lacks, become null."""

    def __init__(self, place: str) -> None:
        self._file = opened(place, "a")

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        row = {"step": step, "time": round(time.time(), 3), **values}
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()

    def close(self, failed: bool) -> None:
        self._file.close()
