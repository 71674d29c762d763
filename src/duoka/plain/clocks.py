"""Clocks: if the script itself reads one, it gets rank 0's time, as its decisions may depend on it.

A date that a library reads, for example to name a folder, is that of the first rank there. Other clocks that
libraries read are not intercepted: they wait in loops whose lengths differ between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import torch

from duoka.plain.builtin import Methods
from duoka.plain.session import Session

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
        if not session.caller.is_direct_script_call():
            return original()
        now = original()  # one message instead of two
        dtype = torch.float64 if isinstance(now, float) else torch.int64
        return session.ranks.broadcast(torch.tensor([now], dtype=dtype, device="cpu"), 0).item()

    return clock


def _agreed(now: Callable[[], Any], session: Session) -> Any:
    caller = session.caller
    if caller.is_direct_script_call():
        with caller.nested():  # it may call `time.time`
            return session.first(now)
    found = now()
    return session.shared_random.agree(found) if caller.may_communicate() and type(found) in _AGREED else found


def _date(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    given = _GIVEN.get(original.__name__, 1)

    def now(*args: Any) -> Any:
        if len(args) >= given and args[given - 1] is not None:
            return original(*args)
        return _agreed(lambda: original(*args), session)

    return now


def _method(original: Any, session: Session) -> Any:
    def now(cls: type[date], *args: Any, **kwargs: Any) -> Any:
        return _agreed(lambda: original.__get__(None, cls)(*args, **kwargs), session)

    return classmethod(now)
