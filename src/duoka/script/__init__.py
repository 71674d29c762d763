"""Of which kind a script is, told by what its source does before anything of it is run.

    files.py    the script and the files of its own that it imports
    signs.py    what in a source tells the kind
    read()      both together, and the verdict

A file that does not parse tells nothing here: Python itself shows its error when it is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from duoka.options import Target
from duoka.script.files import sources
from duoka.script.signs import ANY, Says, Seen, Sign, look

__all__ = ["Kind", "Script", "read"]

BINDING = (Says.STARTS, Says.NEEDS, Says.HANDS_OVER)
DISTRIBUTED = (*BINDING, Says.WANTS, Says.ADAPTS)


class Kind(str, Enum):
    """Of which kind a script is, told by what it does."""

    PLAIN = "plain"  # written for one device
    DISTRIBUTED = "distributed"  # does its own torch.distributed: launched as torchrun would, and left alone
    API = "api"  # uses duoka's API


@dataclass(frozen=True, slots=True)
class Script:
    """What the source of a script tells.

    kind: plain where it can be either, as under `python`, unless it makes
        several ranks there.
    reason: the line that told, like `train.py:12 reads RANK`; empty for a script that can only be plain.
    can_be_either: plain or distributed, as its surroundings or its arguments say.
    local_rank_flag: `--local_rank` or `--local-rank`, as it parses it; None if it does not.
    self_launching: it says itself which rank it is, so it is to be run once, with all cards.
    words: the command-line options that it seems to take, with underscores and without dashes.
    """

    kind: Kind = Kind.PLAIN
    reason: str = ""
    can_be_either: bool = False
    local_rank_flag: str | None = None
    self_launching: bool = False
    words: frozenset[str] = frozenset()

    def takes(self, option: str) -> bool:
        """Whether the script seems to have a command-line option of this name (`--devices`) itself."""
        return ANY in self.words or option.lstrip("-").replace("-", "_") in self.words


def read(target: Target) -> Script:
    """Tell the kind of a script from its source and from the local files that it imports.

    Raises:
        ScriptError: there is no such file or module, or it cannot be read.
    """
    seen = [look(source.tree, source.shown) for source in sources(target)]
    signs = [sign for one in seen for sign in one.signs]
    kind, reason, can_be_either = _verdict(signs, _reached(seen))
    by_environment = any(sign.says in (Says.NEEDS, Says.ASKS) for sign in signs)
    self_launching = not by_environment and any(sign.says is Says.OWN_RANKS for sign in signs)
    if self_launching and kind is Kind.DISTRIBUTED:
        reason = _first(signs, [Says.OWN_RANKS])
    return Script(
        kind=kind,
        reason=reason,
        can_be_either=can_be_either,
        local_rank_flag=next((one.flag for one in seen if one.flag), None),
        self_launching=self_launching,
        words=frozenset().union(*(one.words for one in seen)),
    )


def _verdict(signs: list[Sign], reached: set[str | None]) -> tuple[Kind, str, bool]:
    """The kind, the reason, and whether the script can be plain as well as distributed."""
    if api := _first(signs, [Says.API]):
        return Kind.API, api, False
    always = [sign for sign in signs if not sign.conditions and sign.function in reached]
    if must := _first(always, BINDING):
        return Kind.DISTRIBUTED, must, False
    if wants := _first(signs, [Says.WANTS]):
        return Kind.DISTRIBUTED, wants, True
    if (asks := _first(signs, [Says.ASKS])) and _first(signs, [Says.OWN_RANKS]):
        return Kind.DISTRIBUTED, asks, True  # under python it spawns ranks
    if can := _first(always, DISTRIBUTED) or asks:
        return Kind.PLAIN, can, True
    if might := _first(signs, DISTRIBUTED):
        return Kind.PLAIN, f"{might} only under a condition", True
    return Kind.PLAIN, "", False


def _first(signs: Iterable[Sign], says: Iterable[Says]) -> str:
    wanted = tuple(says)
    return next((f"{sign.where} {sign.text}" for sign in signs if sign.says in wanted), "")


def _reached(seen: list[Seen]) -> set[str | None]:
    """The functions that run whenever the script does: no condition is on the way. None is outside of all."""
    leads: dict[str | None, set[str]] = {}
    for use in (use for one in seen for use in one.uses):
        if not use.conditions:
            leads.setdefault(use.function, set()).add(use.name)
    used = {use.name for one in seen for use in one.uses}
    entries = seen[0].functions - used if seen else set()  # what a command-line library calls
    reached, waiting = {None, *entries}, [None, *entries]
    while waiting:
        found = leads.get(waiting.pop(), set()) - reached
        reached |= found
        waiting += found
    return reached
