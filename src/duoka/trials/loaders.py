"""Observe the batches that a script takes from its loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from duoka.trials.observer import replace_function

Look = Callable[[Any, Any, bool], None]


def watch_loaders(look: Look) -> None:
    """Call `look` with every batch of every loader, as the script takes it.

    look: called with the loader, the batch, and whether the script asked for this rank's rows only (`view="local"`).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:
            batches = original(loader)
            if str(sys._getframe(1).f_globals.get("__name__")).startswith("duoka."):
                return batches  # of duoka's own loader, which reports its batches itself
            is_local = getattr(loader, "_view", "") == "local"
            return _Watched(batches, lambda batch: look(loader, batch, is_local))

        return __iter__

    replace_function(DataLoader, "__iter__", make)
    api = sys.modules.get("duoka.data.loader")
    if api is not None:
        replace_function(api.Loader, "__iter__", make)


class _Watched:
    """An iterator of a loader that calls `look` with every batch."""

    def __init__(self, batches: Any, look: Callable[[Any], None]) -> None:
        self._batches, self._look = iter(batches), look

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._look(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # not set yet while copied or unpickled
            raise AttributeError(name)
        return getattr(self._batches, name)
