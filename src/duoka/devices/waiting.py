"""Wait until devices are free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from duoka.errors import DevicesBusy

T = TypeVar("T")

STEP = 2.0  # seconds between two attempts


def until_free(
    take: Callable[[], T],
    limit: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Call `take` until it does not raise DevicesBusy, and return its result.

    Args:
        take: reads the inventory and locks devices.
        limit: seconds to wait; 0 does not wait.
        say: called with the users of the devices, whenever these change.
        sleep: waits between two attempts.
        clock: monotonic seconds.

    Raises:
        DevicesBusy: the time is over.
    """
    deadline = clock() + limit
    users = ""
    while True:
        try:
            return take()
        except DevicesBusy as busy:
            if limit > 0 and busy.users != users:
                users = busy.users
                say(f"waiting for devices: {users}")
            left = deadline - clock()
            if left <= 0:
                raise
        sleep(min(STEP, left))
