"""The record of how a worker's script ended, which the worker sends as one line of JSON."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

from duoka.errors import AskedError, PeerLost, RanksApart, ScriptError, TimedOut
from duoka.private.texts import NETWORK_NOISE, says
from duoka.supervision import tracebacks
from duoka.supervision.tracebacks import FrameValues, values_of

How = Literal["returned", "exited", "raised"]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker's script; a worker that dies sends none."""

    how: How  # it returned, called sys.exit, or raised an exception
    code: int  # the exit code that Python would give
    time: float = field(default_factory=time.monotonic)  # CLOCK_MONOTONIC at the end, in seconds
    said: str = ""  # the message of sys.exit("...")
    kind: str = ""  # the class of the error
    error: str = ""  # the last line of the traceback
    trace: str = ""  # all of it without duoka's frames
    full_trace: str = ""  # with them
    consequence: bool = False  # the error only reports that another rank ended, did not join, or went apart
    shown: bool = False  # the script's own sys.excepthook has shown the error already
    frames: list[FrameValues] = field(default_factory=list)  # of the script, with their variables, if a consequence
    # If memory ran out, the bytes of parameters, gradients, optimizers' states, and of all tensors.
    held: list[int] = field(default_factory=list)

    def line(self) -> bytes:
        """Serialise it as a line of JSON, which executes no code when read."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Ending:
        read = json.loads(line)
        return cls(**{**read, "frames": [FrameValues(**frame) for frame in read["frames"]]})


def exited(error: SystemExit) -> Ending:
    """Record a sys.exit: None is code 0, a number is the code, anything else is a message and code 1."""
    code, said = 1, ""
    if error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 0xFF
    else:
        said = str(error.code)
    return Ending("exited", code, said=said, consequence=code != 0 and is_consequence(error))


def raised(error: BaseException) -> Ending:
    """Record an exception, and remove duoka's frames from its traceback."""
    if isinstance(error, ScriptError):  # no script has run
        return Ending("exited", 2, said=f"duoka: error: {error}")
    # The time first: the first of the ranks' errors is found by it, and formatting takes a while.
    now, full_trace, consequence = time.monotonic(), tracebacks.shown(error), is_consequence(error)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, AskedError) else 1
    frames = values_of(error) if consequence else []
    tracebacks.trim(error)
    return Ending(
        how="raised",
        code=code,
        time=now,
        kind=type(error).__name__,
        error=tracebacks.headline(error),
        trace=tracebacks.shown(error),
        full_trace=full_trace,
        consequence=consequence,
        frames=frames,
    )


def is_consequence(error: BaseException) -> bool:
    """Return whether this error or its cause only reports that another rank ended or called another collective."""
    seen: set[int] = set()  # errors may be chained in a circle
    linked: BaseException | None = error
    while linked is not None and id(linked) not in seen:
        is_torchs = type(linked).__name__ in ("DistBackendError", "DistNetworkError")
        is_noise = isinstance(linked, RuntimeError) and (is_torchs or says(linked, *NETWORK_NOISE))
        if is_noise or isinstance(linked, (PeerLost, TimedOut, RanksApart)):
            return True
        seen.add(id(linked))
        linked = linked.__cause__ or (None if linked.__suppress_context__ else linked.__context__)
    return False
