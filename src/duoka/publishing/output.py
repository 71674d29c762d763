"""Lines that the script prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from duoka.supervision.rings import TEXT
from duoka.system.messages import observe

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher

_ENDS = re.compile(r"(\r?\n|\r)")


def install(publisher: Publisher) -> None:
    """Keep the last lines that this process prints with Python on standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):
                observe(stream, keeping(publisher))


def keeping(publisher: Publisher) -> Callable[[str], None]:
    """Return a function that is called with each text written to a stream, and keeps the lines."""
    output, rest = publisher.board.script_output, ""

    def keep(line: str, redrawn: bool) -> None:
        if line and not line.isspace():
            output.print(line, redrawn)

    def note(text: str) -> None:
        nonlocal rest
        if not publisher.active:
            return
        try:
            if text == "\n":  # `print` writes it by itself
                line, rest = rest, ""
                keep(line, False)
            elif "\n" in text or "\r" in text:
                *ended, rest = _ENDS.split(rest + text)
                for line, end in zip(ended[::2], ended[1::2], strict=True):
                    keep(line, end == "\r")
            else:
                rest = (rest + text)[:TEXT]
        except Exception:  # the script must not see it
            pass

    return note
