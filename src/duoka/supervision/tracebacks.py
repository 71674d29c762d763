"""What errors of scripts show: tracebacks as Python prints them, without duoka's frames, and their frames' variables.

Variables are read only after the error that ends a run, to find the one that differs between ranks. No code of the
script runs: only values of Python's own types, small arrays, and attributes of these types are read.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType, TracebackType
from typing import Any

from duoka.errors import DuokaError
from duoka.system.user_code import is_installed, is_standard, is_users

OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
RUNS_SCRIPTS = os.path.join(OURS, "script", "target.py")  # frames outside of its own do not belong to the script


def trim(error: BaseException) -> None:
    """Remove duoka's frames from the traceback of `error` and of the errors chained to it, in place.

    An error that did not pass through the script keeps them: it is duoka's own.
    """
    if not (isinstance(error, (SyntaxError, DuokaError)) or _without_ours(_links(error))):
        return
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        linked = waiting.pop()
        if linked is None or id(linked) in seen:
            continue
        seen.add(id(linked))
        kept = _without_ours(_links(linked))
        for link, following in zip(kept, [*kept[1:], None], strict=False):
            link.tb_next = following
        linked.__traceback__ = kept[0] if kept else None
        waiting += [linked.__cause__, linked.__context__, *getattr(linked, "exceptions", ())]


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
    def is_ours(link: TracebackType) -> bool:
        module = str(link.tb_frame.f_globals.get("__name__"))  # generated code has no file
        return _file(link).startswith(OURS) or module.partition(".")[0] == "duoka"

    starts = [at for at, link in enumerate(links) if _file(link) == RUNS_SCRIPTS]
    inside = links[starts[-1] + 1 :] if starts else links
    return [link for link in inside if not is_ours(link)]


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename


AT_END_LINE = 0  # in place of a line: the script has ended
MOST_NAMES, MOST_ATTRIBUTES, MOST_ENTRIES, MOST_NUMBERS = 300, 60, 200, 1 << 16
LONGEST = 60  # characters of a value that is shown
DEEPEST = 3  # containers within containers

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range)
_CONTAINERS = ("list", "tuple", "set", "frozenset", "deque")


@dataclass(frozen=True, slots=True)
class FrameValues:
    """A frame of the script or of a library that it calls: its place, and its variables' values as text."""

    file: str
    function: str
    line: int  # where it is; AT_END_LINE: the script has ended
    values: Mapping[str, str] = field(default_factory=dict)  # by name; `self.step` for attributes


def values_of(error: BaseException) -> list[FrameValues]:
    """Return the frames of an error's traceback, outermost first, except those of duoka, torch and Python's library.

    If no frame is left, return one frame with the script's global variables at its end.
    """
    links = _links(error)
    files = [_file(link) for link in links]
    inside = links[len(files) - files[::-1].index(RUNS_SCRIPTS) :] if RUNS_SCRIPTS in files else []
    frames = [
        FrameValues(_file(link), link.tb_frame.f_code.co_name, link.tb_lineno, _values(link.tb_frame.f_locals))
        for link in inside
        if _is_reported(_file(link))
    ]
    main = sys.modules.get("__main__")
    if not frames and main is not None:  # the error is one of duoka's own collective at the end of the script
        return [FrameValues(getattr(main, "__file__", None) or "", "<module>", AT_END_LINE, _values(vars(main)))]
    return frames


def _is_reported(file: str) -> bool:
    if is_installed(file):
        return not file.startswith(OURS) and "torch" not in file.split("/")
    return not is_standard(file)


def _values(variables: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in list(variables.items())[:MOST_NAMES]:
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        text = _text(value)
        if text is not None:
            texts[name] = text
        elif name == "self" or _is_users(type(value)):
            texts |= {f"{name}.{attribute}": inner for attribute, inner in _attributes(value)}
    return texts


def _attributes(value: Any) -> Iterator[tuple[str, str]]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    for name, attribute in list(attributes.items())[:MOST_ATTRIBUTES]:
        text = None if str(name).startswith("_") else _text(attribute)
        if text is not None:
            yield str(name), text


def _is_users(kind: type) -> bool:
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users(file)


def _text(value: Any) -> str | None:
    """Return a value as short text, equal for equal values; None for a value that is not reported."""
    try:
        text = _described(value, 0)
    except Exception:  # such as a number of too many digits, or a container that another thread changes
        return None
    if text is None or len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... (crc32 {zlib.crc32(text.encode(errors='replace')):08x})"


def _described(value: Any, depth: int) -> str | None:
    kind, array = type(value), _array(value)
    if array is not None or kind in _PLAIN:
        return array or repr(value)
    if depth > DEEPEST or not hasattr(kind, "__len__") or kind.__module__ not in ("builtins", "collections"):
        return None

    def entry(value: Any) -> str:
        text = _described(value, depth + 1)
        if text is None and _is_users(type(value)):
            return f"{type(value).__name__}({', '.join(f'{name}={inner}' for name, inner in _attributes(value))})"
        return type(value).__name__ if text is None else text

    if kind.__name__ in _CONTAINERS:
        entries: Iterator[str] = map(entry, islice(value, MOST_ENTRIES))
    elif isinstance(value, dict):
        entries = (f"{entry(key)}: {entry(inner)}" for key, inner in islice(value.items(), MOST_ENTRIES))
    else:
        return None
    return f"{kind.__name__} of {len(value)}: {', '.join(entries)}"


def _array(value: Any) -> str | None:
    """Return the numbers of a small numpy array, or of a small CPU tensor without gradient, as short text."""
    kind = type(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        if value.device.type != "cpu" or value.requires_grad or value.numel() > MOST_NUMBERS:
            return None
        value = value.detach().numpy()
    elif numpy is None or not (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    if value.size > MOST_NUMBERS or value.dtype.hasobject:
        return None
    if value.size <= 4:
        return str(value.tolist())
    return f"{value.dtype} {value.shape} of crc32 {zlib.crc32(value.tobytes()):08x}"
