"""Open log files."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from duoka.errors import OptionError


def opened(place: str, mode: str) -> TextIO:
    """Open a text file at `place`, creating its directory if necessary.

    Raises:
        OptionError: the file cannot be opened.
    """
    try:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        return open(place, mode, encoding="utf-8", newline="")  # type: ignore[return-value]
    except OSError as error:
        raise OptionError("log", place, "a file that can be written", error.strerror or str(error)) from None
