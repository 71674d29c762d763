"""Whether this machine will train well: `duoka doctor`. One file for each subject, and a line here.

A subject is a function without arguments that gives findings; it never raises for what it finds. Each has a time
limit: what hangs here is a finding, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from duoka.doctor.finding import Finding
from duoka.patience import within

# subject -> (module, function, seconds that it may take)
SUBJECTS = {
    "versions": ("duoka.doctor.versions", "examine", 120.0),  # importing torch from a slow disk
    "cards": ("duoka.doctor.cards", "examine", 90.0),
    "exchange": ("duoka.doctor.exchange", "examine", 180.0),
    "limits": ("duoka.doctor.limits", "examine", 15.0),
    "network": ("duoka.doctor.network", "examine", 30.0),
    "disk": ("duoka.doctor.disk", "examine", 15.0),
}


def examine() -> Iterator[Finding]:
    """All findings, subject by subject."""
    for subject, (module, function, limit) in SUBJECTS.items():
        yield from _of_subject(subject, getattr(import_module(module), function), limit)


def _of_subject(subject: str, look: Callable[[], Iterable[Finding]], limit: float) -> list[Finding]:
    """What is found; that it fails, or does not come back, is a finding, too."""
    found: list[Finding] = []
    try:
        within(limit, lambda: found.extend(look()))
        return found
    except TimeoutError as error:
        what = f"could not be looked at: {error}"
        why, todo = "what uses it will hang as this did", "dmesg may tell what hangs"
        return [*found, Finding("fault", subject, what, why, todo)]
    except Exception as error:
        what = f"could not be looked at: {type(error).__name__}: {error}"
        return [*found, Finding("advice", subject, what, "something unforeseen", "report it, with this line")]
