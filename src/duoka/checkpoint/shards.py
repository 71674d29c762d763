"""Weights in several files and an index, in the format of Hugging Face's libraries.

    model.safetensors.index.json          maps tensors to files
    model-00001-of-00003.safetensors      …

Files that an index names are never overwritten: a save to the same path uses unused names, then replaces the index
atomically, and only then removes the old files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from torch import Tensor

from duoka.checkpoint import disk
from duoka.checkpoint.manifest import INDEX
from duoka.errors import OptionError
from duoka.options import SIZES

_UNITS = {"": 1, **SIZES}


def parse_size(given: int | str) -> int:
    """Parse a number of bytes, or "5GB", "500MB", "2GiB". Raises OptionError."""
    if type(given) is int and given > 0:
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", given.strip()) if isinstance(given, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise OptionError("max_shard_size", given, "a number of bytes above 0, such as 5_000_000_000 or '5GB'")
    return int(float(match[1]) * unit)


def split(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into parts of at most `most` bytes; a larger tensor is a part by itself."""
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


def free_names(path: Path, number: int) -> list[str]:
    """Return names of `number` files beside `path` that its index does not name."""
    named = _named(path)
    return next(free for free in _names(path, number) if not named & set(free))


def replace_index(path: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make the index of `path` name these files, which are written already, and remove the previous ones.

    parts: the tensors of each file.

    Raises:
        OSError: writing failed; either the old or the new files are complete.
    """
    named = _named(path)
    size = sum(it.numel() * it.element_size() for part in parts.values() for it in part.values())
    places = {name: file for file, part in parts.items() for name in part}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n"
    disk.replace(_index(path), lambda beside: disk.write(beside, (text.encode(),)))
    _remove([path, *(path.with_name(name) for name in named)])


def remove_unnamed(path: Path, names: Iterable[str]) -> None:
    """Remove those of the files `names` beside `path` that its index does not name now."""
    _remove(path.with_name(name) for name in set(names) - _named(path))


def remove_shards(path: Path) -> None:
    """Remove the index and then the parts at `path`, which has been written as one file."""
    named = _named(path)
    if named:
        _remove([_index(path), *(path.with_name(name) for name in named)])


def _index(path: Path) -> Path:
    return path.with_name(path.name + INDEX)


def _named(path: Path) -> set[str]:
    """Return the parts that the index of `path` names; ignores files of other paths."""
    part = re.compile(rf"{re.escape(path.stem)}(\.\d+)?-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    try:
        places = json.loads(_index(path).read_bytes())["weight_map"]
        return {name for name in places.values() if part.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _names(path: Path, number: int) -> Iterable[list[str]]:
    """Yield `model-00001-of-00003.safetensors`, …; then the same with `model.1` and so on."""
    for again in count():
        stem = f"{path.stem}.{again}" if again else path.stem
        yield [f"{stem}-{part:05}-of-{number:05}{path.suffix}" for part in range(1, number + 1)]


def _remove(files: Iterable[Path]) -> None:
    """Remove files that no index names; errors are ignored, as such files do no harm."""
    for file in files:
        with suppress(OSError):
            os.unlink(file)
