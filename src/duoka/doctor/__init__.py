"""Checks of a machine for `duoka doctor`, by the subjects in `SUBJECTS`.

A subject is a function without arguments that yields findings; a problem that it detects is a finding, not an
exception. A subject that exceeds its time limit is reported as a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Literal

from duoka.system.time_limit import within

Level = Literal["ok", "advice", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; if not ok, also why it matters and what to do."""

    level: Level  # advice: it works and could be better; fault: something will not work
    subject: str
    what: str
    why: str = ""
    todo: str = ""


ok, advice, fault = partial(Finding, "ok"), partial(Finding, "advice"), partial(Finding, "fault")

# subject -> (module, function, time limit in seconds)
SUBJECTS = {
    "versions": ("duoka.doctor.versions", "examine", 120.0),  # importing torch from a slow disk
    "cards": ("duoka.doctor.host", "examine_cards", 90.0),
    "all-reduce": ("duoka.doctor.all_reduce", "examine", 180.0),
    "limits": ("duoka.doctor.host", "examine_limits", 15.0),
    "network": ("duoka.doctor.host", "examine_network", 30.0),
    "disk": ("duoka.doctor.host", "examine_disks", 15.0),
}


def examine() -> Iterator[Finding]:
    """Yield all findings, subject by subject."""
    for subject, (module, function, limit) in SUBJECTS.items():
        yield from _examine_subject(subject, getattr(import_module(module), function), limit)


def _examine_subject(subject: str, look: Callable[[], Iterable[Finding]], limit: float) -> list[Finding]:
    """Run one subject. A failure or timeout becomes one more finding."""
    findings: list[Finding] = []
    try:  # one by one into the list: what was found before a check hangs is shown
        within(limit, lambda: findings.extend(look()))
        return findings
    except TimeoutError as error:
        what = f"could not be checked: {error}"
        why, todo = "programs that use it will hang, too", "look in dmesg for the cause"
        return [*findings, fault(subject, what, why, todo)]
    except Exception as error:
        what = f"could not be checked: {type(error).__name__}: {error}"
        return [*findings, advice(subject, what, "the check itself failed", "report it, with this line")]
