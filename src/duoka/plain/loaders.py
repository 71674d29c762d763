"""DataLoaders: each rank reads its own rows of every batch."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from duoka.data.dataset_state import batches_held
from duoka.data.splitting import Reader, SplitIterator, can_split
from duoka.plain.entropy import draw_alike
from duoka.plain.session import Session
from duoka.private.torch import GET_ITERATOR
from duoka.view.whole import gather_sharing


def install_workers(session: Session) -> None:
    """Give loader workers whole tensors in place of the batches that a dataset holds: they cannot gather these."""

    @session.patches.around(*GET_ITERATOR)
    def get_iterator(original: Callable[..., Any], self: DataLoader[Any]) -> Any:
        held = batches_held(self.dataset, self.collate_fn, self.worker_init_fn) if self.num_workers else []
        held = [batch for batch in held if not batch._spec.view.of_parameters]
        if not held:
            return original(self)
        alone = copy.copy(self)
        alone.worker_init_fn = partial(
            _begin_alone, list(zip(held, gather_sharing(held), strict=True)), self.worker_init_fn
        )
        return original(alone)


def _begin_alone(copies: list[tuple[Tensor, Tensor]], init: Callable[[int], None] | None, worker: int) -> None:
    """Begin a loader worker: put copies in place of batches, and call the script's own `worker_init_fn`."""
    for batch, full in copies:
        torch.utils.swap_tensors(batch, full.view_as(full))  # a tensor that nothing else refers to
    if init is not None:
        init(worker)


def install(session: Session) -> None:
    """Intercept the creation of a DataLoader's iterator."""
    readers: WeakKeyDictionary[DataLoader[Any], Reader] = WeakKeyDictionary()

    @session.patches.around(*GET_ITERATOR)
    def get_iterator(original: Callable[..., Any], self: DataLoader[Any]) -> Any:
        if isinstance(self.dataset, Reader):
            return original(self)
        if not can_split(self, session.settings.loading):
            return original(_drawing_alike(self, session))
        if self not in readers:
            readers[self] = Reader(self, session.view.shares.of_process, session.settings.loading, session.rank_local)
        return SplitIterator(self, readers[self], session.view)


def _drawing_alike(loader: DataLoader[Any], session: Session) -> DataLoader[Any]:
    """Return a loader that reads whole batches; its workers draw the same on every rank, also if not forked."""
    context = loader.multiprocessing_context or multiprocessing
    source = session.shared_random.started_anew() if session.patches.active else None
    if not loader.num_workers or context.get_start_method() == "fork" or source is None:
        return loader
    alike = copy.copy(loader)
    alike.worker_init_fn = partial(draw_alike, source, loader.worker_init_fn)
    return alike
