"""Queueing until devices are free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from duoka.errors import DevicesBusy

T = TypeVar("T")

STEP = 2.0  # seconds between two looks


def until_free(
    take: Callable[[], T],
    limit: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What `take` returns as soon as it raises DevicesBusy no more.

    Args:
        take: looks at the devices, and takes them.
        limit: how long to wait, in seconds; 0 does not wait.
        say: told for whom one waits, whenever that changes.
        sleep: waits between two looks.
        clock: seconds that only go forward.

    Raises:
        DevicesBusy: the time is over.
    """
    deadline = clock() + limit
    told = ""
    while True:
        try:
            return take()
        except DevicesBusy as busy:
            if limit > 0 and busy.users != told:
                told = busy.users
                say(f"waiting for devices: {told}")
            left = deadline - clock()
            if left <= 0:
                raise
        sleep(min(STEP, left))
