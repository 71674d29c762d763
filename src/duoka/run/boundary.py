"""The boundary of a script that knows of ranks: only batch tensors are shared out there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from duoka.private.torch import tree_leaves
from duoka.view.batch import BatchTensor
from duoka.view.boundary import Boundary, _Inside
from duoka.view.cut import Cut
from duoka.view.draws import OwnStream
from duoka.view.view import View


class ApiBoundary(Boundary):
    """As in a plain script, but a plain tensor that comes without a batch may be this rank's own: it is not cut.

    own_rows: how the batch was shared out of which a local loader has handed out this rank's rows; None where there
    was none. Modules called meanwhile draw from a stream of this rank's own, as its rows are no other rank's, and
    their BatchNorm may use the whole batch's statistics.
    """

    def __init__(self, view: View, own_stream: OwnStream, whole_randomness: bool, whole_norm: bool) -> None:
        super().__init__(view, None if whole_randomness else own_stream, whole_norm)
        self.own_rows: Cut | None = None
        self._local_stream = own_stream

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)` as the script wrote it; `original` is torch's own call."""
        in_model = self.inside is not None or self._around is not None
        if in_model or any(isinstance(leaf, BatchTensor) for leaf in tree_leaves((args, kwargs))):
            return super().call(original, module, args, kwargs)
        if self.own_rows is None or self.open_all:
            return original(module, *args, **kwargs)
        in_batch = self._during(_Inside(self.own_rows)) if self._holds_rows(args) else nullcontext()
        with in_batch, self._local_stream:
            return original(module, *args, **kwargs)

    def _holds_rows(self, args: tuple[Any, ...]) -> bool:
        """Whether what comes in is the share that the loader handed out."""
        assert self.own_rows is not None
        first = next((leaf for leaf in args if hasattr(leaf, "shape")), None)
        return first is not None and tuple(first.shape[:1]) == (self.own_rows.rows,)
