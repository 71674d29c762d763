"""What two runs of one program have in common, and where they go apart."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# What a clock gave: `time: 1.23s`, `ms/batch 1.2`, `iter_dt 3.4ms`, `mfu 0.1%`, tables that begin with seconds.
CLOCK = re.compile(r"(?i)(time:?\s+|ms/batch\s+|iter_dt\s+|mfu\s+|Time\s+|Data\s+)-?\d+(\.\d+)?(\s*\(\s*\d+\.\d+\))?")


def differing_lines(expected: str, actual: str, rtol: float) -> list[str]:
    """Where texts differ, or numbers by more than `rtol` and one in their last place."""
    one, other = (CLOCK.sub("", text).splitlines() for text in (expected, actual))
    found = [f"{a!r} | {b!r}" for a, b in zip(one, other, strict=False) if not _same_line(a, b, rtol)]
    if len(one) != len(other):
        found.append(f"{len(one)} lines | {len(other)} lines")
    return found


def _same_line(one: str, other: str, rtol: float) -> bool:
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(_same_number(a, b, rtol) for a, b in pairs)


def _same_number(one: str, other: str, rtol: float) -> bool:
    digits = len(one.partition(".")[2].partition("e")[0])
    last_place = 1.01 * 10**-digits if digits and "e" not in one else 0
    return math.isclose(float(one), float(other), rel_tol=rtol, abs_tol=last_place)


def differing_files(expected: Path, actual: Path, pattern: str, rtol: float) -> list[str]:
    """Files that only one run has, and how far apart the weights in them are where they are further than `rtol`."""
    names, others = (
        sorted(str(p.relative_to(folder)) for p in folder.glob(pattern)) for folder in (expected, actual)
    )
    if names != others:
        return [f"files {names} | {others}"]
    found = []
    for name in names:
        apart = distance(expected / name, actual / name)
        if apart > rtol:
            found.append(f"{name}: {apart:.1e}")
    return found


def distance(one: Path, other: Path) -> float:
    """The largest difference of two files' tensors, in units of each tensor's largest entry; of other files, 0 or inf."""
    if ".pt" not in one.suffix:
        return 0.0 if one.stat().st_size == other.stat().st_size else math.inf
    before, after = (_tensors(path) for path in (one, other))
    if [t.shape for t in before] != [t.shape for t in after]:
        return math.inf
    gaps = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))
        for a, b in zip(after, before, strict=True)
        if a.numel()
    ]
    return max(gaps, default=0.0)


def _tensors(path: Path) -> list[Tensor]:
    saved = torch.load(path, weights_only=False, pickle_module=_Anything)
    return list(_found(saved, set()))


def _found(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _found(entry, seen)
    elif hasattr(value, "__dict__"):
        yield from _found(vars(value), seen)


class _Stranger:
    """Stands for a class of the program's own in what it has pickled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class _Anything:
    """`pickle`, for classes that cannot be imported here, too."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            known = module.partition(".")[0] in (
                "torch",
                "collections",
                "builtins",
                "numpy",
                "functools",
                "_operator",
            )
            return super().find_class(module, name) if known else _Stranger

    load = pickle.load
