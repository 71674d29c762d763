"""How a worker's script ended, as the worker itself tells it in one line over its wire."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

How = Literal["returned", "exited", "raised"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What a worker says when its script has ended; a worker that dies says nothing.

    how: the last line was reached, or sys.exit was called, or an exception came through.
    code: the exit code that python would give.
    time: CLOCK_MONOTONIC at the end, in seconds.
    said: what sys.exit("...") asked to be said.
    error: the last line of the traceback. trace: all of it without duoka's frames; whole: with them.
    consequence: it only says that another rank went away.
    shown: the script's own sys.excepthook has shown the error already.
    """

    rank: int
    host: str
    how: How
    code: int
    time: float
    said: str = ""
    kind: str = ""
    error: str = ""
    trace: str = ""
    whole: str = ""
    consequence: bool = False
    shown: bool = False

    def line(self) -> bytes:
        """As it goes over the wire: JSON, so that reading it runs no code, and a line end."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Ending:
        """What `line()` gave."""
        return cls(**json.loads(line))
