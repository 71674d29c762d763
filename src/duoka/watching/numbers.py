"""Numbers with names in lines that a script prints: `loss 0.5`, `val loss: 0.5`, `acc=91.2%`, `{'lr': 1e-3}`."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements of the cursor
_WORD = r"[^\W\d][\w./@-]*"
_NAMED = re.compile(
    rf"(?<![\w.])(?P<name>{_WORD}(?: {_WORD}){{0,2}})['\"]?"  # up to three words
    r"(?:\s*[:=\uff1a]\s*|\s+)(?:tensor\()?"
    r"(?P<number>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan\b|inf\b))"
    r"(?=(?:[%a-zA-Zµ]{1,3})?(?:[\s,;|)\]}/'\"]|[.:]?$|[.:]\s))"  # a unit, and no time, date, version or range
)


def numbers_in(line: str) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a line, names as printed; of `9245/10000` the first."""
    for found in _NAMED.finditer(_CODES.sub("", line)):
        yield found["name"], float(found["number"])
