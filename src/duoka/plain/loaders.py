"""DataLoaders: each rank reads its own rows of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from duoka.data.shared import Reader, SharedIterator, can_share
from duoka.plain.session import Session
from duoka.private.torch import GET_ITERATOR


def install(session: Session) -> None:
    """Intercept the making of a DataLoader's iterator."""

    @contextmanager
    def by_itself() -> Iterator[None]:
        """While a rank reads rows that the others do not: its seeds, files and models are its own."""
        with session.patches.aside(), session.calls.computed_whole():
            yield

    readers: WeakKeyDictionary[DataLoader[Any], Reader] = WeakKeyDictionary()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_iterator(self: DataLoader[Any]) -> Any:
            if isinstance(self.dataset, Reader) or not can_share(self, session.plan.loading):
                return original(self)
            reader = readers.get(self)
            if reader is None:
                ranks, loading = session.ranks, session.plan.loading
                reader = Reader(
                    self.dataset,
                    ranks.rank,
                    ranks.world_size,
                    loading,
                    by_itself,
                    session.view.own.world_size,
                    reseeds=session.view.own.exact,
                )
                readers[self] = reader
            return SharedIterator(self, reader, session.view)

        return get_iterator

    session.patches.replace(*GET_ITERATOR, make)
