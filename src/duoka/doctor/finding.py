"""One result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "advice", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; if not ok, also why it matters and what to do.

    level: "ok"; "advice": it works and could be better; "fault": something will not work.
    """

    level: Level
    subject: str
    what: str
    why: str = ""
    todo: str = ""


ok, advice, fault = partial(Finding, "ok"), partial(Finding, "advice"), partial(Finding, "fault")
