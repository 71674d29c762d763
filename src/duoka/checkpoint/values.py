"""Values as JSON, with their tensors in a safetensors file: no pickle, and no code that runs on reading.

Types that JSON lacks are an object with one key that begins with "$": {"$tuple": [1, 2]}. A tensor is
{"$tensor": NAME}, where NAME is its name in the safetensors file.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duoka.checkpoint.formats import Stored
from duoka.errors import CheckpointError

DEEPEST = 100  # levels of nesting


def split(value: Any, at: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split a value into JSON and its tensors, by their path in it.

    Raises:
        CheckpointError: it contains an object that only code can restore: a function, or an instance of a class.
    """
    tensors: dict[str, Tensor] = {}
    return _split(value, at, tensors, 0), tensors


def join(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the value. tensors: by their path; those that are `Stored` stay unread."""
    if isinstance(tree, list):
        return [join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    word = next(iter(tree), "")
    if len(tree) == 1 and word.startswith("$"):
        if word == "$tensor":
            return tensors[tree[word]]
        if word == "$array":
            found = tensors[tree[word]]
            return (found.read() if isinstance(found, Stored) else found).numpy()
        return _JOIN[word](join(tree[word], tensors))
    return {key: join(value, tensors) for key, value in tree.items()}


def _split(value: Any, at: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"{at[:80]}… is nested deeper than {DEEPEST} levels, or contains itself")

    def inner(part: Any, name: object) -> Any:
        return _split(part, f"{at}.{name}" if at else str(name), tensors, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, at, tensors)}
    if kind is list:
        return [inner(part, number) for number, part in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(part, key) for key, part in value.items()}
    if isinstance(value, np.ndarray) and str(value.dtype) in _ARRAYS:
        return {"$array": _keep(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), at, tensors)}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, np.generic) and str(value.dtype) in _ARRAYS:
        return {"$scalar": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
    for word, (known, take_apart) in _SPLIT.items():
        if kind is known:
            return {word: inner(take_apart(value), word)}
    raise CheckpointError(
        f"{at or 'a value'} is of type {kind.__module__}.{kind.__qualname__}, which cannot be kept without code; "
        "keep numbers, strings, lists, dicts and tensors, or give its class state_dict() and load_state_dict()"
    )


def _keep(tensor: Tensor, at: str, tensors: dict[str, Tensor]) -> str:
    """Store a tensor under an unused name: two keys, as 1 and "1", can give the same path."""
    name, again = at or "value", 1
    while name in tensors:
        name, again = f"{at or 'value'}~{again}", again + 1
    tensors[name] = tensor.detach()
    return name


_ARRAYS = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# word -> (the type, its conversion to JSON)
_SPLIT: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$tuple": (tuple, list),
    "$size": (torch.Size, list),
    "$dict": (dict, lambda value: [[key, part] for key, part in value.items()]),
    "$ordered": (OrderedDict, lambda value: [[key, part] for key, part in value.items()]),
    "$counter": (Counter, lambda value: [[key, part] for key, part in value.items()]),
    "$set": (set, list),
    "$frozenset": (frozenset, list),
    "$deque": (deque, lambda value: [list(value), value.maxlen]),
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode()),
    "$bytearray": (bytearray, lambda value: base64.b64encode(value).decode()),
    "$complex": (complex, lambda value: [value.real, value.imag]),
    "$dtype": (torch.dtype, lambda value: str(value)[6:]),
    "$device": (torch.device, str),
}
_JOIN: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$size": torch.Size,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$set": set,
    "$frozenset": frozenset,
    "$deque": lambda kept: deque(kept[0], kept[1]),
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda parts: complex(*parts),
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
    "$float": float,
    "$path": Path,
    "$scalar": lambda kept: np.frombuffer(base64.b64decode(kept[1]), dtype=kept[0])[0],
}
