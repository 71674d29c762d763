"""Module calls of a script that knows of ranks: only batch tensors are shared out there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from duoka.view.batch import batches_in
from duoka.view.calls import ModuleCalls
from duoka.view.cut import Cut
from duoka.view.draws import OwnStream
from duoka.view.view import View


class ApiCalls(ModuleCalls):
    """As in a plain script, but a plain tensor that comes without a batch may be this rank's own: it stays as it is.

    own_rows: how the batch was shared out of which a local loader has handed out this rank's rows; None where there
    was none. Modules called meanwhile draw from a stream of this rank's own, as its rows are no other rank's, and
    their BatchNorm may use the whole batch's statistics.
    """

    def __init__(self, view: View, local_stream: OwnStream) -> None:
        super().__init__(view, converts=False)
        self.own_rows: Cut | None = None
        self.local_stream = local_stream

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)` as the script wrote it; `original` is torch's own call."""
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
        """Whether what comes in is the share that the loader handed out."""
        assert self.own_rows is not None
        first = next((leaf for leaf in args if hasattr(leaf, "shape")), None)
        return first is not None and tuple(first.shape[:1]) == (self.own_rows.rows,)
