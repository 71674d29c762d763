"""Module calls of a script that uses the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from duoka.view.modules.calls import ModuleCalls
from duoka.view.random.generators import RankStream
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import batches_in
from duoka.view.view import View


class ApiCalls(ModuleCalls):
    """Module calls as in a plain script, but plain tensors are not sharded: they may be this rank's own rows.

    own_rows: the partition of the last batch of a loader with view="local"; None without one. Modules called
    meanwhile draw from this rank's own stream, since its rows are not those of other ranks, and BatchNorm may use the
    whole batch.
    """

    def __init__(self, view: View, local_stream: RankStream) -> None:
        super().__init__(view, converts=False)
        self.own_rows: Partition | None = None
        self.local_stream = local_stream

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `module(*args, **kwargs)`. original: torch's own call."""
        if self.own_rows is None or not self.is_outermost or batches_in((args, kwargs)):
            return super().call(original, module, args, kwargs)
        if self.is_whole or self.local is not None:
            return original(module, *args, **kwargs)
        self.local = self.own_rows if self._holds_rows(args) else None
        try:
            with self.local_stream:
                return original(module, *args, **kwargs)
        finally:
            self.local = None

    def _holds_rows(self, args: tuple[Any, ...]) -> bool:
        """Return whether the first argument has this rank's number of rows."""
        assert self.own_rows is not None
        first = next((leaf for leaf in args if hasattr(leaf, "shape")), None)
        return first is not None and tuple(first.shape[:1]) == (self.own_rows.rows,)
