"""What duoka says in a terminal: lines between those of the script; untrusted text; seconds and rates in words."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_INVISIBLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # escape sequences for the cursor and colours


def say(text: str) -> None:
    """Write a line to standard error, if this process has one."""
    if sys.stderr is not None:
        # In a single write: between two, a notebook may show other output.
        print(f"duoka: {text}\n", end="", file=sys.stderr, flush=True)


class Lines:
    """Within the context, write duoka's lines to standard error only between lines of the script.

    It observes what the script writes to the terminal. While a line such as a progress bar is open, duoka's lines
    wait.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._open = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # reentrant, as a handler of a signal may print meanwhile
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Lines:
        for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():  # they may be one
            if _is_where_errors_go(stream):
                self._watch(stream)
        return self

    def __exit__(self, *error: object) -> None:
        for undo in self._undo:
            undo()
        if self._waiting and self._open:
            self._write("\n")
        self._open = False
        self._flush()

    def say(self, text: str) -> None:
        """Write a line now, or when the script's line has ended."""
        with self._lock:
            self._waiting.append(f"duoka: {text}\n")
            self._flush()

    def _watch(self, stream: Any) -> None:
        def note(text: str) -> None:
            with self._lock:
                self._open = is_open(text, self._open)
                if self._waiting and not self._open:
                    stream.flush()  # the script's line first
                    self._flush()

        undo = observe(stream, note)
        if undo is not None:
            self._undo.append(undo)

    def _flush(self) -> None:
        if not self._open and self._waiting and os.getpid() == self._process:  # a fork would write the same again
            self._write("".join(self._waiting))
            self._waiting.clear()

    def _write(self, text: str) -> None:
        stream = sys.__stderr__
        with suppress(OSError, ValueError):  # it may be closed, or full
            if stream is not None:
                stream.flush()
                os.write(stream.fileno(), text.encode(errors="replace"))  # one call: other processes write there, too


def observe(stream: Any, note: Callable[[str], None]) -> Callable[[], None] | None:
    """Call `note` with each text that was written to a stream; returns a function that ends this.

    The stream stays the object that it is. None: it is not a stream of Python's.
    """
    write: Callable[[str], int] = stream.write
    before = vars(stream).get("write") if hasattr(stream, "__dict__") else None

    def seen(text: str) -> int:
        written = write(text)
        note(text)
        return written

    def undo() -> None:
        if before is None:
            del stream.write
        else:
            stream.write = before

    try:
        stream.write = seen
    except AttributeError:
        return None
    return undo


def is_open(text: str, before: bool) -> bool:
    """Return whether the last line is not ended once `text` is written. before: whether it was open until then."""
    *ended, last = _INVISIBLE.sub("", text).split("\n")
    shown = [part for part in last.split("\r") if part]
    return bool(shown[-1].strip()) if shown else before and not ended


def _is_where_errors_go(stream: Any) -> bool:
    """Return whether this stream writes to the same file as standard error."""
    streams: tuple[Any, ...] = stream, sys.__stderr__
    try:
        ours, errors = (os.fstat(file.fileno()) for file in streams)
    except (AttributeError, OSError, ValueError):
        return False
    return (ours.st_dev, ours.st_ino, ours.st_rdev) == (errors.st_dev, errors.st_ino, errors.st_rdev)


LONGEST = 4096  # characters


def printable(text: object, longest: int = LONGEST) -> str:
    """Return the text with control and direction characters escaped, cut to `longest` characters."""
    shown = str(text)
    if len(shown) > longest:
        shown = f"{shown[: longest - 3]}..."
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in shown
    )


def listed(noun: str, items: Sequence[object]) -> str:
    """Return `rank 1`, `ranks 0 and 2`, `ranks 0, 1 and 3`."""
    if len(items) == 1:
        return f"{noun} {items[0]}"
    return f"{noun}s {', '.join(map(str, items[:-1]))} and {items[-1]}"


def duration(seconds: float) -> str:
    """Format seconds: `0:07`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_words(seconds: float) -> str:
    """Format seconds: `1.2 s`, `12.3 ms`, `103 µs`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def per_second(rate: float) -> str:
    """Format a rate with four digits: `0.512`, `13,250`."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
