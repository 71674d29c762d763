"""`run.loader`: global batches, of which each rank loads and holds its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from duoka.data.order import Pieces, PieceSampler, drawing_from, generator_states
from duoka.data.sources import BatchSource, ContextFactory, choose
from duoka.errors import OptionError
from duoka.hardware.accelerator import has_streams
from duoka.planning.options import Loading
from duoka.private.torch import tree_leaves, tree_map_only
from duoka.view.view import View


class Loader:
    """Yields global batches, epoch after epoch; created by `run.loader`.

    batch_size: of the global batch; None if a batch sampler decides. dataset: the data set it reads. data_loader:
    torch's DataLoader, which reads whole batches. epoch: number of epochs read to their end.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        source: BatchSource,
        piece_sampler: PieceSampler | None,
        device: torch.device,
        held: ContextFactory,
    ) -> None:
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.epoch = 0
        self.data_loader = loader
        self._source, self._piece_sampler = source, piece_sampler
        self._device, self._held = device, held
        self._seen = 0  # batches of this epoch that were yielded
        self._order: dict[str, Any] = {}  # states of the generators from which the epoch's order was drawn
        self._resumed = False
        self._going_on = 0  # iterations that have begun and not ended
        self._step_hooks: list[Callable[[], object]] = []

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on every rank."""
        return len(self.data_loader)

    def __iter__(self) -> Iterator[Any]:
        around = self._seen, self._order
        source = self._begin()
        if self._piece_sampler is not None:
            source = self._in_pieces(source, self._piece_sampler)
        return self._iterate(source, around)

    def _iterate(self, source: Iterator[Any], around: tuple[int, dict[str, Any]]) -> Iterator[Any]:
        """Yield the batches. around: the position to restore if this iteration ends early within another one."""
        seen, order = self._seen, self._order
        within = self._going_on
        self._going_on += 1
        try:
            for batch in source:
                seen += 1
                self._seen, self._order = seen, order
                yield batch
                for hook in self._step_hooks:
                    hook()
        except GeneratorExit:
            if within:
                self._seen, self._order = around
            raise
        finally:
            self._going_on -= 1
        self.epoch, self._seen = self.epoch + 1, 0

    def _begin(self) -> Iterator[Any]:
        """Return the batches of the epoch, on this rank's device, from the first that was not yielded yet."""
        set_epoch = getattr(self.data_loader.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        self._source.epoch = self.epoch
        if self._resumed and self._seen:
            self._resumed = False
            with drawing_from(self._order, self.data_loader):
                batches = self._source.begin(self._skipped())
                self._source.draw()
        else:
            self._resumed, self._seen = False, 0
            self._order = generator_states(self.data_loader)
            if self._piece_sampler is not None:
                self._piece_sampler.groups.clear()
            batches = self._source.begin(0)
        return to_device(batches, self._device)

    def _skipped(self) -> int:
        """Return how many pieces, or batches, the first `_seen` batches of the epoch have."""
        if self._piece_sampler is None:
            return self._seen
        sizes = [len(self._piece_sampler.sizes(n)) for n in _sizes(self.data_loader)[: self._seen]]
        return sum(sizes)

    def _in_pieces(self, pieces: Iterator[Any], piece_sampler: PieceSampler) -> Iterator[Pieces]:
        skipped = self._seen
        while True:
            first = next(pieces, None)
            if first is None:
                return
            for _ in range(skipped):
                piece_sampler.groups.popleft()
            skipped = 0
            group = Pieces(first, pieces, piece_sampler.groups.popleft(), self._held)
            yield group
            group.finish()

    def register_step_hook(self, hook: Callable[[], object]) -> None:
        """Register a function to be called whenever the loop has finished a batch; the position is then after it."""
        self._step_hooks.append(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, also within an epoch, valid for any number of ranks and loader workers."""
        order = self._order if self._seen else generator_states(self.data_loader)
        return {"epoch": self.epoch, "batch": self._seen, "order": order}

    def load_state_dict(self, state: Any) -> None:
        """Continue at the first batch that was not yielded.

        Raises OptionError if `state` is not from `state_dict`.
        """
        if not isinstance(state, dict) or state.keys() != {"epoch", "batch", "order"}:
            raise OptionError("load_state_dict", sorted(state), "what a loader's state_dict() gave")
        self.epoch, self._seen, self._order = state["epoch"], state["batch"], state["order"]
        self._resumed = True
        with drawing_from(self._order, self.data_loader):
            pass  # restores the loader's own generators; the script's are restored by the script


def make_loader(
    data: Any,
    batch_size: int | None,
    view: View,
    device: torch.device,
    loading: Loading,
    held: ContextFactory,
    rank_local: ContextFactory,
    *,
    shuffle: bool = False,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    how: dict[str, Any],
) -> Loader:
    """Create a Loader; see `duoka.run.Run.loader`.

    held: a context in which gradients are not all-reduced. rank_local: a context in which this rank reads data that
    the others do not.
    """
    loader = data if isinstance(data, DataLoader) else _made(data, batch_size, shuffle, device, how)
    if loader is data and (batch_size is not None or shuffle or how):
        raise OptionError(
            "run.loader", "a DataLoader and options", "given one or the other", "set them in the DataLoader"
        )
    samplers: tuple[Any, ...] = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        hint = "leave it out: duoka splits every batch by itself"
        raise OptionError("run.loader", "a DistributedSampler", "given samplers of one device", hint)
    piece_sampler = _piece_sampler(loader, accumulate, micro_batch)
    source = choose(loader, piece_sampler, view, loading, rank_local)
    return Loader(loader, source, piece_sampler, device, held)


def _made(data: Any, batch_size: int | None, shuffle: bool, device: torch.device, how: dict[str, Any]) -> Any:
    dataset = _dataset(data)
    _check_batch_size(batch_size, how)
    if shuffle and (how.get("sampler") is not None or how.get("batch_sampler") is not None):
        hint = "a sampler decides the order: leave shuffle out"
        raise OptionError("run.loader", "shuffle=True and a sampler", "given one of both", hint)
    if shuffle and isinstance(dataset, IterableDataset):
        raise OptionError("shuffle", True, "left out for a dataset without indices", "let the dataset shuffle")
    if has_streams(device) and not _holds_gpu_tensors(dataset):  # which cannot be pinned
        how = {"pin_memory": True} | how
    if batch_size is not None:
        how = {"batch_size": batch_size} | how
    try:
        return DataLoader(dataset, shuffle=shuffle or None, **how)
    except (TypeError, ValueError) as error:
        raise OptionError("run.loader", sorted(how), "given options of DataLoader", str(error)) from None


def _dataset(data: Any) -> Dataset[Any]:
    """Return a dataset; tensors and arrays with equal numbers of rows become a TensorDataset."""
    if isinstance(data, (Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, (tuple, list)) and data and all(isinstance(array, (Tensor, np.ndarray)) for array in data):
        tensors = [torch.as_tensor(array) for array in data]
        rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        if len(set(rows)) > 1 or rows[0] == 0:
            allowed = "tensors with equal numbers of rows, at least 1"
            raise OptionError("data of run.loader", f"tensors of {rows} rows", allowed)
        return TensorDataset(*tensors)
    if isinstance(data, dict):
        hint = "torch.utils.data.StackDataset(**tensors) is a dataset of dicts"
        raise OptionError("data of run.loader", "a dict", "a dataset, a DataLoader, tensors or arrays", hint)
    if not hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
        hint = "for example: run.loader((images, labels), batch_size=256)"
        raise OptionError("data of run.loader", type(data), "a dataset, a DataLoader, tensors or arrays", hint)
    return data  # type: ignore[no-any-return]


def _holds_gpu_tensors(data: Any, depth: int = 4) -> bool:
    """Return whether a dataset has tensors of a GPU among its attributes; no sample is read."""
    if isinstance(data, Tensor):
        return data.device.type != "cpu"
    if isinstance(data, dict):
        data = tuple(data.values())
    parts = data[:8] if isinstance(data, (tuple, list)) else vars(data).values() if hasattr(data, "__dict__") else ()
    return depth > 0 and any(_holds_gpu_tensors(part, depth - 1) for part in parts)


def _check_batch_size(batch_size: object, how: dict[str, Any]) -> None:
    if how.get("batch_sampler") is not None:
        if batch_size is not None:
            raise OptionError("batch_size", batch_size, "left out where a batch_sampler is given")
        return
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise OptionError("batch_size", batch_size, "a whole number of samples, at least 1: of all ranks together")


def _piece_sampler(loader: DataLoader[Any], accumulate: Any, micro_batch: Any) -> PieceSampler | None:
    if accumulate is None and micro_batch is None:
        return None
    name, value = ("accumulate", accumulate) if micro_batch is None else ("micro_batch", micro_batch)
    if accumulate is not None and micro_batch is not None:
        raise OptionError("run.loader", "accumulate and micro_batch", "given one of both")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(name, value, "a whole number, at least 1")
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise OptionError(name, value, "left out for a dataset without indices", "use a smaller batch_size")
    return PieceSampler(loader.batch_sampler, accumulate, micro_batch)


def _sizes(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the sizes of an epoch's batches, computed without iterating the sampler.

    Raises OptionError if the loader has a batch_sampler of the user, so that the sizes are not known.
    """
    if loader.batch_size is None:
        raise OptionError("load_state_dict", "in mid-epoch", "used without pieces where a batch_sampler is given")
    total = len(loader.sampler)  # type: ignore[arg-type]
    full, rest = divmod(total, loader.batch_size)
    return [loader.batch_size] * full + [rest] * (rest > 0 and not loader.drop_last)


# Batches on the device, each copied while the previous one is computed on.


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on `device`; with streams the next one is copied on its own while one is in use."""
    if device.type == "cpu":
        return batches
    if not has_streams(device):
        return (_to(batch, device) for batch in batches)
    return _prefetch(batches, device)


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True), batch)


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream, current = torch.Stream(device), torch.accelerator.current_stream

    def copied() -> Any:
        stream.wait_stream(current(device))  # which may write what the batch is taken from
        with stream:
            for batch in batches:
                return _to(batch, device), stream.record_event()
        return None

    coming = copied()
    while coming is not None:
        batch, there = coming
        current(device).wait_event(there)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current(device))  # keeps the memory of all shares until this stream is done
        coming = copied()
        yield batch
