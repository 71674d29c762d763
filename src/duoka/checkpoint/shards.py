"""Weights in several files and an index of them, as Hugging Face's libraries write and read them.

    model.safetensors.index.json          which tensor is in which file
    model-00001-of-00003.safetensors      …

Files that an index names are never written over: a save in the place of another takes names that are free, then the
index is exchanged, in one go, and only then the old files are removed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from torch import Tensor

from duoka.checkpoint import disk
from duoka.errors import OptionError

INDEX = ".index.json"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(given: int | str) -> int:
    """Bytes: a number, or "5GB", "500MB", "2GiB"; raises OptionError."""
    if type(given) is int and given > 0:
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", given.strip()) if isinstance(given, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise OptionError("max_shard_size", given, "a number of bytes above 0, such as 5_000_000_000 or '5GB'")
    return int(float(match[1]) * unit)


def split(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, in parts of at most `most` bytes; a tensor that is larger is alone."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if parts[-1] and size + own > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += own
    return parts


def write_shards(
    path: Path, parts: list[dict[str, Tensor]], write: Callable[[dict[str, Tensor], Path], None]
) -> None:
    """Write the parts beside `path`, each by `write`, and an index of them.

    Raises:
        OSError: it could not be done, or whatever `write` raised; what was there before is whole, or what is new.
    """
    named = _named(path)
    names = next(free for free in _names(path, len(parts)) if not named & set(free))
    try:
        for name, part in zip(names, parts, strict=True):
            write(part, path.with_name(name))
        size = sum(it.numel() * it.element_size() for part in parts for it in part.values())
        places = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n"
        disk.replace(_index(path), lambda beside: disk.write(beside, (text.encode(),)))
    except BaseException:
        _remove(path.with_name(name) for name in set(names) - _named(path))  # the index may be exchanged already
        raise
    _remove([path, *(path.with_name(name) for name in named)])


def remove_shards(path: Path) -> None:
    """Remove the parts that stood in the place of `path`, which has been written as one file: the index first."""
    named = _named(path)
    if named:
        _remove([_index(path), *(path.with_name(name) for name in named)])


def _index(path: Path) -> Path:
    return path.with_name(path.name + INDEX)


def _named(path: Path) -> set[str]:
    """The parts that the index of `path` names, if there is one; other files that it names are not this one's."""
    part = re.compile(rf"{re.escape(path.stem)}(\.\d+)?-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    try:
        places = json.loads(_index(path).read_bytes())["weight_map"]
        return {name for name in places.values() if part.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _names(path: Path, number: int) -> Iterable[list[str]]:
    """`model-00001-of-00003.safetensors`, …; then the same with `model.1` and so on, until one is free."""
    for again in count():
        stem = f"{path.stem}.{again}" if again else path.stem
        yield [f"{stem}-{part:05}-of-{number:05}{path.suffix}" for part in range(1, number + 1)]


def _remove(files: Iterable[Path]) -> None:
    """Remove files that nothing names any longer; what cannot be removed does no harm."""
    for file in files:
        with suppress(OSError):
            os.unlink(file)
