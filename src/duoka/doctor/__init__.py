"""Whether this machine will train well: `duoka doctor`. One file for each subject, and a line here.

A subject is a function without arguments that gives findings; it never raises for what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from duoka.doctor.finding import Finding

# subject -> (module, function)
SUBJECTS = {
    "versions": ("duoka.doctor.versions", "examine"),
    "cards": ("duoka.doctor.cards", "examine"),
    "exchange": ("duoka.doctor.exchange", "examine"),
    "limits": ("duoka.doctor.limits", "examine"),
    "network": ("duoka.doctor.network", "examine"),
    "disk": ("duoka.doctor.disk", "examine"),
}


def examine() -> Iterator[Finding]:
    """All findings, subject by subject. A subject that fails is a finding, too."""
    for subject, (module, function) in SUBJECTS.items():
        try:
            yield from getattr(import_module(module), function)()
        except Exception as error:
            what = f"could not be looked at: {type(error).__name__}: {error}"
            yield Finding("advice", subject, what, "something unforeseen", "report it, with this line")
