"""File locks: those of libraries are taken by each rank, those of the script once for all ranks.

While a library holds a lock (as `datasets` does around its cache), its rank reads and writes files without the other
ranks: these may wait for the lock, so waiting for them would be a deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from filelock import AcquireReturnProxy, BaseFileLock  # which torch depends on

from duoka.plain.session import Session


def install(session: Session) -> None:
    """Intercept `acquire` and `release` of `filelock`'s locks."""
    caller = session.caller
    taken: WeakKeyDictionary[BaseFileLock, int] = WeakKeyDictionary()  # the script's locks -> times, on every rank

    @session.patches.around(BaseFileLock, "acquire")
    def acquire(original: Callable[..., Any], self: BaseFileLock, *args: Any, **kwargs: Any) -> Any:
        if caller.is_script_call(through="filelock"):
            session.first(lambda: original(self, *args, **kwargs) and None)
            taken[self] = taken.get(self, 0) + 1
            return AcquireReturnProxy(self)
        caller.locks[self] = threading.get_ident()  # it opens its file on each rank, too
        try:
            return original(self, *args, **kwargs)
        finally:
            if not self.is_locked:
                caller.locks.pop(self, None)

    @session.patches.around(BaseFileLock, "release")
    def release(original: Callable[..., Any], self: BaseFileLock, *args: Any, **kwargs: Any) -> None:
        # if in `taken`: the garbage collector releases others, on each rank at another time
        if self in taken and caller.is_script_call(through="filelock"):
            session.ranks.barrier()  # others may still change what it protects
            taken[self] -= 1
            if not taken[self]:
                del taken[self]
        original(self, *args, **kwargs)
        if not self.is_locked:
            caller.locks.pop(self, None)
