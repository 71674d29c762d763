"""Untrusted text (of another machine, another user's process, a file) for a terminal."""

from __future__ import annotations

LONGEST = 4096  # characters


def printable(text: object, longest: int = LONGEST) -> str:
    """Return the text with control and direction characters escaped, cut to `longest` characters."""
    shown = str(text)
    if len(shown) > longest:
        shown = f"{shown[: longest - 3]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown)
