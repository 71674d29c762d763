"""How far apart two runs of one program are."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# What a clock gave: `time: 1.23s`, `ms/batch 1.2`, `iter_dt 3.4ms`, `mfu 0.1%`, `SPS: 12`, `Time  0.1 ( 0.2)`.
# Of Lightning's bar: `0:00:08 • 0:00:42 1.55it/s`.
# Of Hugging Face's Trainer: `'eval_runtime': '0.1'`, `'eval_samples_per_second': '9'`.
CLOCK = re.compile(
    r"(?i)\b(time:?|ms/batch|iter_dt|mfu|data|sps:)\s+-?\d+(\.\d+)?(\s*\(\s*\d+\.\d+\))?"
    r"|'\w+(_runtime|_per_second)': '?[\d.e+-]+'?"
    r"|-?\d+:\d\d:\d\d|[\d.]+it/s"
)
ZERO = 1e-6  # smaller numbers are what rounding leaves of zero, such as sums of biases that have no gradient
KNOWN = ("torch", "collections", "builtins", "numpy", "functools", "_operator")


def text_gap(expected: str, actual: str) -> float:
    """The largest relative difference of two numbers that were printed; infinite where the texts differ."""
    lines = zip_longest(CLOCK.sub("", expected).splitlines(), CLOCK.sub("", actual).splitlines(), fillvalue="")
    return max((_line_gap(one, other) for one, other in lines), default=0.0)


def _line_gap(one: str, other: str) -> float:
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return math.inf
    return max(map(_number_gap, NUMBER.findall(one), NUMBER.findall(other)), default=0.0)


def _number_gap(one: str, other: str) -> float:
    """Relative, beyond one unit in the last place that was printed."""
    digits = len(one.partition("e")[0].partition(".")[2])
    last_place = 1.01 * 10**-digits if digits and "e" not in one else 0.0
    a, b = float(one), float(other)
    return max(abs(a - b) - last_place, 0.0) / max(abs(a), abs(b), ZERO)


def files_gap(expected: Path, actual: Path, pattern: str) -> float:
    """The largest difference of weights that were saved, in units of each tensor's largest entry; of other files, the
    size must be the same. Infinite where one run has a file that the other has not.
    """
    names, others = ({path.relative_to(folder) for path in folder.glob(pattern)} for folder in (expected, actual))
    if names != others:
        return math.inf
    return max((_file_gap(expected / name, actual / name) for name in names), default=0.0)


def _file_gap(one: Path, other: Path) -> float:
    if ".pt" not in one.name:
        return 0.0 if one.stat().st_size == other.stat().st_size else math.inf
    before, after = (list(_tensors(_loaded(path), set())) for path in (one, other))
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return math.inf
    return max((_tensor_gap(a, b) for a, b in zip(before, after, strict=True) if a.numel()), default=0.0)


def _tensor_gap(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-3))


def _loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False, pickle_module=_Anything)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):  # tied ones too: in one file they are one object, in another two of the same memory
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


class _Stranger:
    """Stands for a class of the program's own in what it has pickled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class _Anything:
    """`pickle`, for classes that cannot be imported here, too."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(module, name) if module.partition(".")[0] in KNOWN else _Stranger

    load = pickle.load
