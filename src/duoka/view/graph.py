"""The autograd graph behind tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from duoka.view.batch import BatchTensor


def graph(outputs: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of the autograd graph that led to these tensors, each once, in one order on all ranks.

    outputs: of a batch, the graph of this process's rows. ends: nodes that are left out, with what is behind them.
    """
    stop = set(ends)
    nodes = [node_of(leaf) for leaf in map(_rows, outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    pending = [node for node in nodes if node not in stop]
    pending.reverse()
    seen = {*pending, *stop}
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def node_of(tensor: Tensor) -> Any:
    """The node that a tensor's gradient arrives at; for a batch, that of this process's rows."""
    return torch.autograd.graph.get_gradient_edge(_rows(tensor)).node


def _rows(value: Any) -> Any:
    return value._shares[-1]._rows if isinstance(value, BatchTensor) else value
