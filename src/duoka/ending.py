"""How a worker's script ended: as the worker finds it, and tells it in one line over its wire."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from duoka import traces
from duoka.errors import AskedError, PeerLost, RanksApart, ScriptError, TimedOut
from duoka.private.texts import NETWORK_NOISE, says

How = Literal["returned", "exited", "raised"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What a worker says when its script has ended; a worker that dies says nothing.

    how: the last line was reached, or sys.exit was called, or an exception came through.
    code: the exit code that python would give.
    time: CLOCK_MONOTONIC at the end, in seconds.
    said: what sys.exit("...") asked to be said.
    error: the last line of the traceback. trace: all of it without duoka's frames; whole: with them.
    consequence: it only says that another rank went away, did not come, or came to something else.
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


def returned(rank: int) -> Ending:
    """The script's last line was reached."""
    return Ending(rank, socket.gethostname(), "returned", 0, time.monotonic())


def exited(rank: int, error: SystemExit) -> Ending:
    """The script called sys.exit: None is 0, a number is the code, and all else is to be said and is 1."""
    code, said = 1, ""
    if error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 0xFF
    else:
        said = str(error.code)
    lost = code != 0 and is_consequence(error)
    return Ending(rank, socket.gethostname(), "exited", code, time.monotonic(), said=said, consequence=lost)


def raised(rank: int, error: BaseException) -> Ending:
    """An exception came through the script. Takes duoka's own frames out of its traceback."""
    now, host, whole = time.monotonic(), socket.gethostname(), traces.shown(error)
    if isinstance(error, ScriptError):  # there is no script that could be shown to have raised it
        return Ending(rank, host, "exited", 2, now, said=f"duoka: error: {error}")
    traces.trim(error)
    return Ending(
        rank=rank,
        host=host,
        how="raised",
        code=_code_of(error),
        time=now,
        kind=type(error).__name__,
        error=traces.headline(error),
        trace=traces.shown(error),
        whole=whole,
        consequence=is_consequence(error),
    )


def is_consequence(error: BaseException) -> bool:
    """Whether this error, or one that it was raised for, only says that another rank went away, or elsewhere."""
    return any(_is_network_error(one) for one in _chain(error))


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, AskedError) else 1


def _is_network_error(error: BaseException) -> bool:
    if isinstance(error, (PeerLost, TimedOut, RanksApart)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    return says(error, *NETWORK_NOISE)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
