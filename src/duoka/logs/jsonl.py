"""`jsonl:PATH`: one JSON object in a line, added to what is there."""

from __future__ import annotations

import json
import math
import time

from duoka.logs.base import Log, Value
from duoka.logs.files import opened


class JsonLines(Log):
    """Every line is whole as soon as it is written. A number that JSON does not have (nan, inf) is null."""

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


def _plain(value: Value | None) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
