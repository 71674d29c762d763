"""Clocks: the script and its libraries read rank 0's, as their decisions may depend on it.

Libraries also wait in loops whose lengths differ between ranks. There, and where only one rank reads a clock, it
reads its own (`collectives/readings.py`). A date that a library reads is that of the first rank there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime
from types import FrameType
from typing import Any
from zlib import crc32

from duoka.plain.patching import Methods
from duoka.plain.session import Session
from duoka.system.user_code import is_users_frame

CLOCKS = "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time"
DATES = "ctime strftime localtime gmtime"  # of now, without an argument
_AGREED = (date, datetime, str, time.struct_time)  # types that are picklable
_GIVEN = {"strftime": 2}  # number of arguments with a given time, if not 1


def install(session: Session) -> None:
    """Intercept the clocks of `time`, and dates computed from them."""
    for name in CLOCKS.split():
        session.patches.replace(time, name, lambda original: _clock(original, session))
    for name in DATES.split():
        session.patches.replace(time, name, lambda original: _date(original, session))
    for kind, name in ((datetime, "now"), (datetime, "utcnow"), (date, "today")):
        methods = Methods(kind)
        session.patches.put(methods, name, _method(getattr(methods, name), session))


def _clock(original: Callable[[], Any], session: Session) -> Callable[[], Any]:
    def clock() -> Any:
        now, frame = original(), session.caller.common_frame()
        return now if frame is None else session.ranks.reading(now, _digest_of_line(frame), is_users_frame(frame))

    return clock


def _digest_of_line(frame: FrameType) -> int:
    """Return 32 bits that name a line of code."""
    return crc32(f"{frame.f_lineno} {frame.f_code.co_name}".encode())


def _agreed(now: Callable[[], Any], session: Session) -> Any:
    caller = session.caller
    if caller.is_direct_script_call():
        with caller.nested():  # it may call `time.time`
            return session.first(now)
    reading = now()
    return session.shared_random.agree(reading) if caller.may_communicate() and type(reading) in _AGREED else reading


def _date(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    arguments = _GIVEN.get(original.__name__, 1)

    def now(*args: Any) -> Any:
        if len(args) >= arguments and args[arguments - 1] is not None:
            return original(*args)
        return _agreed(lambda: original(*args), session)

    return now


def _method(original: Any, session: Session) -> Any:
    def now(cls: type[date], *args: Any, **kwargs: Any) -> Any:
        return _agreed(lambda: original.__get__(None, cls)(*args, **kwargs), session)

    return classmethod(now)
