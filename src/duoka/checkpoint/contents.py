"""The contents of a file of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duoka.checkpoint.stored import Stored


@dataclass(frozen=True)
class FileContents:
    """The contents of a file or directory, whose tensors are not read yet.

    format: name of the format. tree: dicts, lists and values as saved, with tensors as `Stored`. metadata: of the
    file. notes: remarks for the user about the reading. check: finds damage that reading does not; raises
    WeightsError or CheckpointError.
    """

    path: Path
    format: str
    tree: Any
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None

    def tensors(self) -> dict[str, Stored]:
        """Return all tensors by their path in the tree, joined by dots."""
        return dict(_leaves(self.tree))


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Stored]]:
    if isinstance(node, Stored):
        yield at, node
        return
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    for key, value in items:
        yield from _leaves(value, f"{at}.{key}" if at else str(key))
