"""Detect code that uses the size of a batch as a number, not only as the size of a tensor.

Compiled code gets this rank's rows, and so their number as the batch's size. That is right if the size is used in
`view`, `expand` or `zeros`, and nowhere else. So while a call is checked, batch sizes are ints that report their use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from duoka.private.torch import tree_leaves
from duoka.view.support.recent import KEPT, Recent

_TRUSTED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_AS_SIZES = frozenset(
    {"view", "reshape", "unflatten", "expand", "broadcast_to", "repeat", "tile", "zeros", "ones", "full", "empty"}
    | {"new_zeros", "new_ones", "new_full", "new_empty"}
)
_AS_NUMBERS = frozenset({"__len__", "numel", "nelement", "nbytes"})
_OPERATORS = """
__add__ __radd__ __sub__ __rsub__ __truediv__ __rtruediv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__
__abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __int__ __float__ __index__ __hash__ __str__ __repr__
__format__ __divmod__ __rdivmod__ __round__ __and__ __or__ __xor__ __lshift__ __rshift__ __invert__
"""


class BatchSize(int):
    """An int that sets `watch.used` if code other than torch's and duoka's uses it as a number."""

    watch: SizeWatch

    @staticmethod
    def of(value: int, watch: SizeWatch) -> BatchSize:
        """Create a BatchSize for the size of a batch, or for a multiple of it."""
        size = BatchSize(value)
        size.watch = watch
        return size

    def __mul__(self, other: Any) -> Any:
        product = int.__mul__(self, other)
        return product if product is NotImplemented else BatchSize.of(product, self.watch)

    __rmul__ = __mul__


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operator(self: BatchSize, *args: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TRUSTED):
            self.watch.used = True
        return plain(self, *args)

    return operator


for _name in _OPERATORS.split():
    setattr(BatchSize, _name, _telling(_name))


class SizeWatch(TorchFunctionMode):
    """A context that sets `used` if a batch size is used as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def size(self, shape: list[int], dim: int) -> torch.Size:
        """Return the shape of a batch with its samples in dimension `dim`."""
        return torch.Size([BatchSize.of(size, self) if at == dim else size for at, size in enumerate(shape)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _AS_NUMBERS or (
            name not in _AS_SIZES and any(type(leaf) is BatchSize for leaf in tree_leaves((args, kwargs)))
        ):
            self.used = True
        return func(*args, **kwargs)


@contextmanager
def watched(view: Any) -> Iterator[SizeWatch]:
    """Give batches made in this context sizes that report their use; caches of the view are empty meanwhile."""
    before = view.metas, view.programs, view.calls, view.outcomes
    view.metas, view.programs, view.calls, view.outcomes = (Recent(KEPT) for _ in before)
    view.watch = SizeWatch()
    try:
        with view.watch:
            yield view.watch
    finally:
        view.metas, view.programs, view.calls, view.outcomes = before
        view.watch = None
