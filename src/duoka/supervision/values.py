"""The values of a script's variables when its ranks went apart, to find the one that differs between them.

They are read only after the error that ends the run, so they cost nothing before. No code of the script runs: only
values of Python's own types, small arrays, and attributes of these types are read.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from duoka.supervision.tracebacks import OURS, RUNS_SCRIPTS
from duoka.system.modules import is_installed, is_standard, is_users

AT_END_LINE = 0  # in place of a line: the script has ended
MOST_NAMES, MOST_ATTRIBUTES, MOST_ENTRIES, MOST_NUMBERS = 300, 60, 200, 1 << 16
LONGEST = 60  # characters of a value that is shown
DEEPEST = 3  # containers within containers

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range)
_CONTAINERS = ("list", "tuple", "set", "frozenset", "deque")


@dataclass(frozen=True, slots=True)
class FrameValues:
    """A frame of the script or of a library that it calls: its place, and its variables' values as text.

    line: where it is; AT_END_LINE: the script has ended. values: by name; `self.step` for attributes.
    """

    file: str
    function: str
    line: int
    values: Mapping[str, str] = field(default_factory=dict)


def values_of(error: BaseException) -> list[FrameValues]:
    """Return the frames of an error's traceback, outermost first, except those of duoka, torch and Python's library.

    If no frame is left, return one frame with the script's global variables at its end.
    """
    link, frames = error.__traceback__, []
    while link is not None:
        frames.append((link.tb_frame, link.tb_lineno))
        link = link.tb_next
    files = [frame.f_code.co_filename for frame, _ in frames]
    inside = frames[len(files) - files[::-1].index(RUNS_SCRIPTS) :] if RUNS_SCRIPTS in files else []
    found = [_frame_values(frame, line) for frame, line in inside if _is_reported(frame.f_code.co_filename)]
    main = sys.modules.get("__main__")
    if not found and main is not None:
        return [FrameValues(getattr(main, "__file__", None) or "", "<module>", AT_END_LINE, _values(vars(main)))]
    return found


def _is_reported(file: str) -> bool:
    if is_installed(file):
        return not file.startswith(OURS) and "torch" not in file.split("/")
    return not is_standard(file)


def _frame_values(frame: FrameType, line: int) -> FrameValues:
    code = frame.f_code
    return FrameValues(code.co_filename, code.co_name, line, _values(frame.f_locals))


def _values(variables: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in list(variables.items())[:MOST_NAMES]:
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        text = _text(value)
        if text is not None:
            found[name] = text
        elif name == "self" or _is_users(type(value)):
            found |= {f"{name}.{attribute}": inner for attribute, inner in _attributes(value)}
    return found


def _attributes(value: Any) -> Iterator[tuple[str, str]]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    for name, one in list(attributes.items())[:MOST_ATTRIBUTES]:
        text = None if str(name).startswith("_") else _text(one)
        if text is not None:
            yield str(name), text


def _is_users(kind: type) -> bool:
    """Return whether a class is the script's own."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users(file)


def _text(value: Any) -> str | None:
    """Return a value as short text, equal for equal values; None for a value that is not reported."""
    try:
        text = _array(value) or _whole(value, 0)
    except Exception:  # such as a number of too many digits, or a container that another thread changes
        return None
    if text is None or len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... (crc32 {zlib.crc32(text.encode(errors='replace')):08x})"


def _whole(value: Any, depth: int) -> str | None:
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if depth > DEEPEST or not hasattr(kind, "__len__") or kind.__module__ not in ("builtins", "collections"):
        return None
    if kind.__name__ in _CONTAINERS:
        entries = (_entry(one, depth) for one in _first(value))
    elif isinstance(value, dict):
        entries = (f"{_entry(key, depth)}: {_entry(one, depth)}" for key, one in _first(value.items()))
    else:
        return None
    return f"{kind.__name__} of {len(value)}: {', '.join(entries)}"


def _first(values: Any) -> Iterator[Any]:
    return (one for one, _ in zip(values, range(MOST_ENTRIES), strict=False))


def _entry(value: Any, depth: int) -> str:
    text = _array(value) or _whole(value, depth + 1)
    if text is not None:
        return text
    if not _is_users(type(value)):
        return type(value).__name__
    return f"{type(value).__name__}({', '.join(f'{name}={inner}' for name, inner in _attributes(value))})"


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
