"""A cache of limited size."""

from __future__ import annotations

from typing import Any

KEPT = 8192  # entries


class Recent(dict[Any, Any]):
    """A dict that keeps at least the `size / 2` entries used last, and at most `size`; a missing one is None.

    Finding a recent entry costs as much as in a dict: there are two generations, and an entry that is found in the
    older moves to the younger, which becomes the older one when it is full.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._half = size // 2
        self._older: dict[Any, Any] = {}

    def __missing__(self, key: Any) -> Any:
        value = self._older.pop(key, None)
        if value is not None:
            self.keep(key, value)
        return value

    def keep(self, key: Any, value: Any) -> None:
        """Add a value, which must not be None."""
        if len(self) >= self._half:
            self._older = dict(self)
            super().clear()
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self._older = {}

    def everything(self) -> list[Any]:
        """Return all values."""
        return [*self._older.values(), *self.values()]
