"""Lines that the script prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from duoka.supervision.told import TEXT, Told
from duoka.system.messages import observe

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher

_ENDS = re.compile(r"(\r?\n|\r)")


def install(publisher: Publisher) -> None:
    """Keep the last lines that this process prints with Python on standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):
                observe(stream, keeping(publisher.board.told, lambda: publisher.active))


def keeping(told: Told, is_active: Callable[[], bool]) -> Callable[[str], None]:
    """Return a function that is called with each text written to a stream, and keeps the lines."""
    rest = ""

    def note(text: str) -> None:
        nonlocal rest
        if not is_active():
            return
        if "\n" not in text and "\r" not in text:
            rest = (rest + text)[:TEXT]
            return
        *ended, rest = _ENDS.split(rest + text)
        for line, end in zip(ended[::2], ended[1::2], strict=True):
            if line and not line.isspace():
                told.print(line, end == "\r")

    def note_safely(text: str) -> None:
        with suppress(Exception):  # the script must not see it
            note(text)

    return note_safely
