"""A table that keeps what is asked for, and forgets the rest."""

from __future__ import annotations

from typing import Any

KEPT = 8192  # programs, and kinds of batches


class Recent(dict[Any, Any]):
    """`table[key]` is None for what is not there. Keeps `size` entries that were used last, at least half of them.

    Looking up what is there costs what it costs in a dict: entries are of two generations, and one that is found in
    the older goes into the younger.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._half = size // 2
        self._older: dict[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        found = self._older.pop(key, None)
        if found is not None:
            self.keep(key, found)
        return found

    def keep(self, key: Any, value: Any) -> None:
        """Put a value that is not None."""
        if len(self) >= self._half:
            self._older = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self._older = {}

    def everything(self) -> list[Any]:
        """All values."""
        return [*self._older.values(), *self.values()]
