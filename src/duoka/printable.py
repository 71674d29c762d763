"""What comes from elsewhere (another machine, another user's process, a file), as it may be shown on a terminal."""

from __future__ import annotations

LONGEST = 4096  # characters


def printable(text: object, longest: int = LONGEST) -> str:
    """The text without what a terminal would obey: control characters and directions are written as escapes.

    A long text is cut.
    """
    shown = str(text)
    if len(shown) > longest:
        shown = f"{shown[: longest - 3]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown)
