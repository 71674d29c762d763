"""What is in a file of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.checkpoint.stored import Stored


@dataclass(frozen=True)
class Contents:
    """What is in a file, or in the files of a directory, whose tensors are not read yet.

    format: in words. tree: dicts, lists and plain values as they were saved; a tensor in it is a `Stored`.
    metadata: what the file says about itself. notes: what is worth telling about how it was read.
    check: finds damage that reading would not; raises WeightsError or CheckpointError.
    """

    path: Path
    format: str
    tree: Any
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None

    def tensors(self) -> dict[str, Stored]:
        """All tensors, by their path in the tree, joined by dots."""
        return dict(_leaves(self.tree))


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Stored]]:
    if isinstance(node, Stored):
        yield at, node
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, value in items:
        yield from _leaves(value, f"{at}.{key}" if at else str(key))
