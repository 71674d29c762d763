"""Clocks: the script and its libraries read rank 0's, as their decisions may depend on it.

Libraries also wait in loops whose lengths differ between ranks. There, and where only one rank reads a clock, it
reads its own (`collectives/readings.py`). A date that a library reads is that of the first rank there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime
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
    caller = session.caller

    @session.patches.around(time, *CLOCKS.split())
    def clock(original: Callable[[], Any]) -> Any:
        now, frame = original(), caller.common_frame()
        if frame is None:
            return now
        line = crc32(f"{frame.f_lineno} {frame.f_code.co_name}".encode())
        return session.ranks.reading(now, line, is_users_frame(frame))

    def agreed(now: Callable[[], Any]) -> Any:
        frame = caller.common_frame()
        if frame is not None and is_users_frame(frame):
            return session.first(now)
        reading = now()
        agrees = caller.may_communicate() and type(reading) in _AGREED
        return session.shared_random.agree(reading) if agrees else reading

    @session.patches.around(time, *DATES.split())
    def date_now(original: Callable[..., Any], *args: Any) -> Any:
        position = _GIVEN.get(original.__name__, 1)
        if len(args) >= position and args[position - 1] is not None:
            return original(*args)
        return agreed(lambda: original(*args))

    def method(original: Any) -> Any:
        return classmethod(lambda cls, *args, **how: agreed(lambda: original.__get__(None, cls)(*args, **how)))

    for kind, name in ((datetime, "now"), (datetime, "utcnow"), (date, "today")):
        methods = Methods(kind)
        session.patches.put(methods, name, method(getattr(methods, name)))
