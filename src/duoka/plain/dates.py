"""`datetime.now()` and its like: rank 0's, where the script itself asks, as of every clock.

A folder that is named by them is the same for all ranks.
"""

from __future__ import annotations

import ctypes
import gc
from datetime import date, datetime
from typing import Any

from duoka.plain.session import Session


def install(session: Session) -> None:
    """Intercept what dates take from the clock."""
    caller = session.caller

    def make(original: Any) -> Any:
        def now(cls: type[date], *args: Any, **kwargs: Any) -> Any:
            found = original.__get__(None, cls)
            if not caller.is_script_itself():
                return found(*args, **kwargs)
            with caller.busy():  # it may look at `time.time`
                return session.first(lambda: found(*args, **kwargs))

        return classmethod(now)

    for kind, name in ((datetime, "now"), (datetime, "utcnow"), (date, "today")):
        methods = _Methods(kind)
        session.patches.put(methods, name, make(getattr(methods, name)))


class _Methods:
    """The methods of a class that is written in C, to be set like attributes.

    In the class itself: a class in its place would not be the one that its instances are pickled as.
    """

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        return self.kind.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        (methods,) = gc.get_referents(self.kind.__dict__)
        methods[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self.kind))
