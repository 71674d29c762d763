"""Tracebacks of scripts as Python would print them, without duoka's frames."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

from duoka.errors import DuokaError

OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
RUNS_SCRIPTS = OURS + "target.py"  # frames outside of its own do not belong to the script


def trim(error: BaseException) -> None:
    """Remove duoka's frames from the traceback of `error` and of the errors chained to it, in place.

    An error that did not pass through the script keeps them: it is duoka's own.
    """
    if not (isinstance(error, (SyntaxError, DuokaError)) or _without_ours(_links(error))):
        return
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kept = _without_ours(_links(one))
        for link, following in zip(kept, [*kept[1:], None], strict=False):
            link.tb_next = following
        one.__traceback__ = kept[0] if kept else None
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def shown(error: BaseException) -> str:
    """Return what Python prints when `error` ends a program."""
    return "".join(traceback.format_exception(error))


def headline(error: BaseException) -> str:
    """Return the last line of a traceback: the type and message of the error."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _links(error: BaseException) -> list[TracebackType]:
    links: list[TracebackType] = []
    link = error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    return links


def _without_ours(links: list[TracebackType]) -> list[TracebackType]:
    starts = [place for place, link in enumerate(links) if _file(link) == RUNS_SCRIPTS]
    inside = links[starts[-1] + 1 :] if starts else links
    return [link for link in inside if not _is_ours(link)]


def _is_ours(link: TracebackType) -> bool:
    module = str(link.tb_frame.f_globals.get("__name__"))  # generated code has no file
    return _file(link).startswith(OURS) or module.partition(".")[0] == "duoka"


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename
