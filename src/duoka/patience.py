"""Asking what may never answer: a driver, a name server, a disk of another machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns, or raises, if it does so in time; asked in a thread, which is else left behind.

    Raises:
        TimeoutError: it does not.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def asking() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=asking, name="duoka-asking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
