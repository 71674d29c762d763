"""Rules for recurrent layers and cells, and for packed sequences, of which each rank packs its own.

`pack_padded_sequence` sorts the batch by length. Nothing is sent: each rank keeps its rows and notes where they are
in the sorted batch (`Ordered`), and where their entries are in the packed data (`Packed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import PACK, PAD_PACKED, tree_map_only
from duoka.view.rules.draws import SeededMode
from duoka.view.rules.lookup import NotByRows, argument, functions, rows_in
from duoka.view.rules.randomness import placing
from duoka.view.shares.partition import Partition
from duoka.view.shares.strides import contiguous_strides
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec
from duoka.view.whole import compute_whole

KEPT = 16  # orders and packings of a batch that are one object each, so that rows are known to be the same


@dataclass(frozen=True, eq=False)
class Scattered(Partition):
    """A partition whose shares are not contiguous. positions: of each rank's rows in the batch, ascending (CPU)."""

    positions: Sequence[Tensor] = field(default=(), repr=False)
    __eq__ = object.__eq__  # not by the number of rows alone
    __hash__ = object.__hash__

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return 0, *accumulate(map(len, self.positions))

    @cached_property
    def _places(self) -> Tensor:
        """Position of each row of the batch in the concatenation of all shares."""
        return torch.cat(list(self.positions)).argsort()

    def local_rows(self, full: Any, dim: int) -> Any:
        return full.index_select(dim, self.positions[self.rank].to(full.device))

    def in_order(self, rows: Any) -> Any:
        return rows.index_select(0, self._places.to(rows.device))

    def of_process(self, rank: int, counts: Sequence[int]) -> Partition:
        ends = [0, *accumulate(counts)]
        joined = [torch.cat(list(self.positions[start:stop])) for start, stop in pairwise(ends)]
        return Scattered(self.n, rank, len(counts), joined)


@dataclass(frozen=True, eq=False)
class Ordered(Scattered):
    """The rows of the partition `natural` in another order: row `order[i]` is at position i."""

    natural: Partition = field(default_factory=lambda: Partition(0, 0, 1), repr=False)
    order: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)


@dataclass(frozen=True, eq=False)
class Packed(Scattered):
    """The entries of packed sequences. sequences: their partition. lengths: of all sequences, descending."""

    sequences: Partition = field(default_factory=lambda: Partition(0, 0, 1), repr=False)
    lengths: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    @cached_property
    def own_sizes(self) -> Tensor:
        """Number of this rank's sequences that have not ended, for each step."""
        return _going_on(self.lengths[_positions(self.sequences)[self.rank]])


def _positions(partition: Partition) -> Sequence[Tensor]:
    if isinstance(partition, Scattered):
        return partition.positions
    return [torch.arange(*partition.bounds(rank)) for rank in range(partition.world_size)]


def _going_on(lengths: Tensor) -> Tensor:
    return (lengths > torch.arange(int(lengths.max())).unsqueeze(1)).sum(1)


def _kept(partition: Partition, key: Any, make: Any) -> Any:
    """Return the object cached for a partition and a key, or make it."""
    known = partition.__dict__.setdefault("_made", {})
    if key not in known:
        if len(known) >= KEPT:
            known.pop(next(iter(known)))
        known[key] = make()
    return known[key]


def reordered(partition: Partition, index: Tensor) -> Partition | None:
    """Return the partition in which row `index[i]` is at position i; None unless `index` is a permutation."""
    index = index.detach().cpu()
    if not torch.equal(index.sort().values, torch.arange(partition.n)):
        return None
    natural, order = (
        (partition.natural, partition.order[index]) if isinstance(partition, Ordered) else (partition, index)
    )
    if torch.equal(order, torch.arange(partition.n)):
        return natural

    def make() -> Ordered:
        owner = torch.empty(partition.n, dtype=torch.long)
        for rank in range(partition.world_size):
            owner[slice(*natural.bounds(rank))] = rank
        positions = [(owner[order] == rank).nonzero().flatten() for rank in range(partition.world_size)]
        return Ordered(partition.n, partition.rank, partition.world_size, positions, natural, order)

    kept: Ordered = _kept(natural, order.numpy().tobytes(), make)
    return kept


def select_rows(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """index_select along the batch by a permutation: only the order in the partition changes."""
    batch, dim = args[0], argument(args, kwargs, 1, "dim")
    index = argument(args, kwargs, 2, "index")
    spec = batch._spec
    if (spec.outer, spec.inner) != (1, 1) or isinstance(index, BatchTensor) or index.shape != (spec.partition.n,):
        return NotImplemented
    if isinstance(spec.partition, Packed):
        return NotImplemented
    partition = reordered(spec.partition, index)
    if partition is None:
        return NotImplemented
    before, after = _positions(spec.partition)[spec.partition.rank], _positions(partition)[partition.rank]
    chosen = torch.searchsorted(before, index.detach().cpu()[after])
    rows = batch._local.index_select(dim, chosen.to(batch._local.device))
    return BatchTensor(rows, Spec(spec.view, partition, spec.dim))


def pack(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `_pack_padded_sequence(padded, lengths, batch_first)`: data (entries, ...), and sizes of each step."""
    padded, lengths, batch_first = args
    if not isinstance(padded, BatchTensor):
        return NotImplemented
    spec = padded._spec
    if (spec.dim, spec.outer, spec.inner) != (0 if batch_first else 1, 1, 1) or isinstance(spec.partition, Packed):
        return NotImplemented
    all_lengths = lengths.full_tensor() if isinstance(lengths, BatchTensor) else lengths
    if (
        all_lengths.shape != (spec.partition.n,)
        or int(all_lengths.min()) < 1
        or int(all_lengths.max()) > padded.shape[1 - spec.dim]
        or not torch.equal(all_lengths, all_lengths.sort(descending=True)[0])
    ):
        return NotImplemented  # torch raises the error
    sizes = _going_on(all_lengths)

    def make() -> Packed:
        entries = (sizes.cumsum(0) - sizes).unsqueeze(1) + torch.arange(spec.partition.n)
        there = all_lengths > torch.arange(len(sizes)).unsqueeze(1)
        positions = [
            entries[:, local_lengths][there[:, local_lengths]] for local_lengths in _positions(spec.partition)
        ]
        total = int(sizes.sum())
        return Packed(
            total, spec.partition.rank, spec.partition.world_size, positions, spec.partition, all_lengths.clone()
        )

    partition = _kept(spec.partition, ("packed", all_lengths.numpy().tobytes()), make)
    local_lengths = all_lengths[_positions(spec.partition)[spec.partition.rank]]
    data, _ = func(padded._local, local_lengths, batch_first)
    return BatchTensor(data, Spec(spec.view, partition)), sizes


def pad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `_pad_packed_sequence(data, sizes, batch_first, value, length)`, padded to the longest of the batch."""
    data, sizes, batch_first, value, length = args
    partition = packed_cut(data, sizes)
    longest = max(length, len(sizes))
    rows, _ = func(data._local, partition.own_sizes, batch_first, value, longest)
    strides = contiguous_strides((longest, partition.sequences.n, *data.shape[1:]))
    if batch_first:  # the same memory, which a rank with a single row would take for contiguous
        strides = strides[1], strides[0], *strides[2:]
    spec = Spec(data._spec.view, partition.sequences, 0 if batch_first else 1)
    return BatchTensor(rows, spec, strides), partition.lengths.clone()


def packed_cut(data: Any, sizes: Any) -> Packed:
    """Return the partition of packed data in its original order; raise NotByRows for anything else."""
    if not isinstance(data, BatchTensor) or not isinstance(data._spec.partition, Packed):
        raise NotByRows
    spec, partition = data._spec, data._spec.partition
    if (spec.dim, spec.outer, spec.inner) != (0, 1, 1) or isinstance(sizes, BatchTensor):
        raise NotByRows
    if not torch.equal(sizes, _going_on(partition.lengths)):
        raise NotByRows
    return partition


def layers(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute LSTM, GRU and RNN layers for inputs (T, n, F), or (n, T, F) with `batch_first`.

    The n samples are the batch; states have the shape (layers, n, H). Dropout between layers is drawn for (T, n, H).
    """
    if kwargs or len(args) != 9:
        return NotImplemented
    if isinstance(args[3], (list, tuple)):
        return _of_packed(func, args)
    data, states, weights, _, count, dropout, training, _, batch_first = args
    dim = 0 if batch_first else 1
    spec = _spec_of([(data, dim), *((state, 1) for state in _listed(states))])
    drops = bool(dropout and training and count > 1)
    if drops and _draws_for_all_rows(data, spec):
        return _rows_of_whole(func, args, spec.at(dim), spec.at(1))
    rows, local_states = rows_in(data, spec, dim), _states(states, weights, spec.at(1))
    steps, of_steps = data.shape[1 - dim], data.stride(1 - dim)
    if rows.shape[dim] == 1 < min(spec.size, steps) and of_steps != spec.size * data.stride(dim):
        rows = rows.clone()  # torch copies samples that it cannot view as (T·n, F): a write is not seen
    draws = placing(lambda shape: spec.at(1) if len(shape) == 3 else None)
    with draws if drops else nullcontext():
        out, *after = func(rows, local_states, *args[2:])
    return BatchTensor(out, spec.at(dim)), *(BatchTensor(state, spec.at(1)) for state in after)


def _of_packed(func: Function, args: Args) -> Any:
    """Compute the same of packed data (entries, F); dropout between layers is drawn for (entries, H)."""
    data, sizes, states, weights, _, count, dropout, training, _ = args
    partition = packed_cut(data, sizes)
    spec = data._spec
    drops = bool(dropout and training and count > 1)
    sequences = Spec(spec.view, partition.sequences, 1)
    if drops and _draws_for_all_rows(data, spec):
        return _rows_of_whole(func, args, spec, sequences)
    local_states = _states(states, weights, sequences)
    with ExitStack() as draws:
        if drops:
            draws.enter_context(placing(lambda shape: spec if len(shape) > 1 else None))
            draws.enter_context(SeededMode(_draw_for_entries))
        out, *after = func(data._local, partition.own_sizes, local_states, *args[3:])
    if spec.view.has_sharded and out.requires_grad:
        out, *after = ReadWeights.apply(1 + len(after), out, *after, *weights)
    return BatchTensor(out, spec), *(BatchTensor(state, sequences) for state in after)


class ReadWeights(torch.autograd.Function):
    """Return the results of a layer; read its weights in the backward pass, which gathers sharded ones.

    torch reads those of states in that pass only where a sequence has several steps: some ranks would not gather.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *grads, *[None] * len(ctx.saved_tensors)  # which gathers them


def _draw_for_entries(operator: Any, args: Args, kwargs: Kwargs) -> Any:
    """Draw for (entries, H) what torch draws for (T, sequences, H), if a rank's sequences have one length."""
    shape = args[0].shape
    out = operator(args[0].flatten(0, 1) if len(shape) == 3 else args[0], *args[1:], **kwargs)
    return tree_map_only(Tensor, lambda drawn: drawn.view(shape), out)


def _draws_for_all_rows(data: Tensor, spec: Spec) -> bool:
    """Return True if only a call with all rows drops what one device drops: cuDNN draws in an order of its own.

    All rows take it hardly longer, as the steps in time come one after another.
    """
    return spec.view.rank_stream is None and torch.backends.cudnn.is_acceptable(data)


def _rows_of_whole(func: Function, args: Args, spec: Spec, of_states: Spec) -> Any:
    """Compute all rows on every rank, and return the batches of this rank's rows of the output and the states."""
    if spec.view.shares.several:
        return NotImplemented  # what follows is computed whole, too: shares have no gradients of parts of a whole
    results = compute_whole(func, args, {})
    specs = [spec, *[of_states] * (len(results) - 1)]
    return tuple(BatchTensor(at.local_rows(full).contiguous(), at) for full, at in zip(results, specs, strict=True))


def _spec_of(places: list[tuple[Any, int]]) -> Spec:
    """Return the placement of the first batch; raise NotByRows if the samples of any are in another dimension."""
    batches = [(value._spec, dim) for value, dim in places if isinstance(value, BatchTensor)]
    if not batches or any(spec.dim != dim for spec, dim in batches):
        raise NotByRows
    return batches[0][0]


def _states(states: Any, weights: Sequence[Any], spec: Spec) -> Any:
    """Return the local rows of states, which are placed as in `spec`; raise NotByRows if a weight is a batch."""
    if any(isinstance(weight, BatchTensor) for weight in weights):
        raise NotByRows
    # The samples are no first dimension of a state, and cuDNN wants its rows side by side.
    rows = tuple(rows_in(state, spec, spec.dim).contiguous() for state in _listed(states))
    return rows if isinstance(states, (list, tuple)) else rows[0]


def _listed(states: Any) -> list[Tensor]:
    return list(states) if isinstance(states, (list, tuple)) else [states]


def cell(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """lstm_cell, gru_cell and their kind of (n, F) and states (n, H)."""
    if kwargs or len(args) < 4:
        return NotImplemented
    data, states, *weights = args
    spec = _spec_of([(data, 0), *((state, 0) for state in _listed(states))])
    out = func(rows_in(data, spec, 0), _states(states, weights, spec), *weights)
    return tuple(BatchTensor(part, spec) for part in out) if isinstance(out, tuple) else BatchTensor(out, spec)


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(PACK, (torch,)), pack),
    **dict.fromkeys(functions(PAD_PACKED[1], (torch,)), pad),
    **dict.fromkeys(functions("lstm gru rnn_tanh rnn_relu", (torch,)), layers),
    **dict.fromkeys(functions("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", (torch,)), cell),
}
