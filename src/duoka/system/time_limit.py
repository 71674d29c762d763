"""Call functions that may never return: a driver, a name server, a network file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Call `ask` in a thread and return its result, or raise its error.

    A thread that exceeds the limit is left running. Raises TimeoutError if it did not return within `seconds`.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def asking() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    # Daemon: the interpreter does not wait for it at exit, as it does for those of an executor.
    thread = threading.Thread(target=asking, name="duoka-asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
