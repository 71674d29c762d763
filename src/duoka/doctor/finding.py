"""One thing that was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "advice", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and where it is not well, why it matters and what to do.

    level: ok; advice, where it works and could be better; fault, where something will not work.
    """

    level: Level
    subject: str
    what: str
    why: str = ""
    todo: str = ""
