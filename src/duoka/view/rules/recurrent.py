"""Rules for recurrent layers and cells, with replicated weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from duoka.view.rules.lookup import NotByRows, functions, rows_in
from duoka.view.rules.packing import packed_cut
from duoka.view.rules.randomness import placing
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec


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
    rows, local_states = rows_in(data, spec, dim), _states(states, weights, spec.at(1))
    draws = placing(lambda shape: spec.at(1) if len(shape) == 3 else None)
    with draws if dropout and training and count > 1 else nullcontext():
        out, *after = func(rows, local_states, *args[2:])
    return BatchTensor(out, spec.at(dim)), *(BatchTensor(state, spec.at(1)) for state in after)


def _of_packed(func: Function, args: Args) -> Any:
    """Compute the same of packed data (entries, F); dropout between layers is drawn for (entries, H).

    For a single sequence torch draws for (entries, 1, H).
    """
    data, sizes, states, weights, _, count, dropout, training, _ = args
    partition = packed_cut(data, sizes)
    spec = data._spec
    sequences = Spec(spec.view, partition.sequences, 1)
    local_states = _states(states, weights, sequences)
    draws = placing(lambda shape: spec if len(shape) > 1 else None)
    with draws if dropout and training and count > 1 else nullcontext():
        out, *after = func(data._local, partition.own_sizes, local_states, *args[3:])
    return BatchTensor(out, spec), *(BatchTensor(state, sequences) for state in after)


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
    rows = tuple(rows_in(state, spec, spec.dim) for state in _listed(states))
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
    **dict.fromkeys(functions("lstm gru rnn_tanh rnn_relu", (torch,)), layers),
    **dict.fromkeys(functions("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", (torch,)), cell),
}
