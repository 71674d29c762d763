"""Find out the kind of a script from its source, without running it.

    target.py   the script and the local files that it imports; runs it as the main program
    signs.py    source code that shows the kind
    read()      the verdict on both

A file that does not parse has no signs; Python reports the error when the script runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from duoka.script.signs import ANY, Findings, Meaning, Sign, look
from duoka.script.target import Target, sources

__all__ = ["Kind", "Script", "Target", "read"]

BINDING = (Meaning.STARTS, Meaning.NEEDS, Meaning.HANDS_OVER)
DISTRIBUTED = (*BINDING, Meaning.WANTS, Meaning.ADAPTS)


class Kind(str, Enum):
    """The kind of a script."""

    PLAIN = "plain"  # written for one device
    DISTRIBUTED = "distributed"  # calls torch.distributed itself: launched as by torchrun, without interceptions
    API = "api"  # uses duoka's API


@dataclass(frozen=True, slots=True)
class Script:
    """Properties of a script, read from its source."""

    kind: Kind = Kind.PLAIN  # plain if it can be either, as under `python`, unless it makes several ranks there
    reason: str = ""  # the line that shows the kind, like `train.py:12 reads RANK`; empty if it can only be plain
    can_be_either: bool = False  # plain or distributed, depending on its environment or arguments
    local_rank_flag: str | None = None  # `--local_rank` or `--local-rank`, as the script parses it
    self_launching: bool = False  # it starts its own ranks, so it is run once, with all GPUs
    words: frozenset[str] = frozenset()  # options that it seems to take, with underscores and without dashes

    def takes(self, option: str) -> bool:
        """Return whether the script seems to have a command-line option of this name, such as `--devices`."""
        return ANY in self.words or option.lstrip("-").replace("-", "_") in self.words


def read(target: Target) -> Script:
    """Find out the kind of a script from its source and the local files that it imports.

    Raises ScriptError if the script or module does not exist or cannot be read.
    """
    findings = [look(source.tree, source.shown) for source in sources(target)]
    signs = [sign for finding in findings for sign in finding.signs]
    kind, reason, can_be_either = _verdict(signs, _reached(findings))
    by_environment = any(sign.meaning in (Meaning.NEEDS, Meaning.ASKS) for sign in signs)
    self_launching = not by_environment and any(sign.meaning is Meaning.OWN_RANKS for sign in signs)
    if self_launching and kind is Kind.DISTRIBUTED:
        reason = _first(signs, [Meaning.OWN_RANKS])
    return Script(
        kind=kind,
        reason=reason,
        can_be_either=can_be_either,
        local_rank_flag=next((finding.flag for finding in findings if finding.flag), None),
        self_launching=self_launching,
        words=frozenset().union(*(finding.words for finding in findings)),
    )


def _verdict(signs: list[Sign], reached: set[str | None]) -> tuple[Kind, str, bool]:
    """Return the kind, the reason, and whether the script can be plain as well as distributed."""
    if api := _first(signs, [Meaning.API]):
        return Kind.API, api, False
    always = [sign for sign in signs if not sign.conditions and sign.function in reached]
    if must := _first(always, BINDING):
        return Kind.DISTRIBUTED, must, False
    if wants := _first(signs, [Meaning.WANTS]):
        return Kind.DISTRIBUTED, wants, True
    if (asks := _first(signs, [Meaning.ASKS])) and _first(signs, [Meaning.OWN_RANKS]):
        return Kind.DISTRIBUTED, asks, True  # under python it spawns ranks
    if can := _first(always, DISTRIBUTED) or asks:
        return Kind.PLAIN, can, True
    if might := _first(signs, DISTRIBUTED):
        return Kind.PLAIN, f"{might} only under a condition", True
    return Kind.PLAIN, "", False


def _first(signs: Iterable[Sign], meanings: Iterable[Meaning]) -> str:
    wanted = tuple(meanings)
    return next((f"{sign.where} {sign.text}" for sign in signs if sign.meaning in wanted), "")


def _reached(findings: list[Findings]) -> set[str | None]:
    """Return the functions that always run: no condition is on the way. None stands for module level."""
    leads: dict[str | None, set[str]] = {}
    uses = [sign for finding in findings for sign in finding.signs if sign.meaning is Meaning.USES]
    for use in uses:
        if not use.conditions:
            leads.setdefault(use.function, set()).add(use.text)
    # What nothing uses is called by a command-line library (click, fire), to which its decorator has given it.
    entries = findings[0].functions - {use.text for use in uses} if findings else set()
    reached, waiting = {None, *entries}, [None, *entries]
    while waiting:
        new = leads.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached
