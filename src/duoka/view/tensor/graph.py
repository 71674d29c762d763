"""The autograd graph behind tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from duoka.view.tensor.batch import BatchTensor


def graph(outputs: Iterable[Any], ends: Iterable[Any] = (), kinds: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield the nodes of the autograd graph of these tensors, each once, in the same order on all ranks.

    outputs: tensors; of a batch, the graph of the local rows is used. ends, kinds: nodes, and classes of nodes, at
    which the search stops.
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
            if following is not None and following not in seen and not isinstance(following, kinds):
                seen.add(following)
                pending.append(following)


def node_of(tensor: Tensor) -> Any:
    """Return the autograd node into which a tensor's gradient flows; for a batch, that of the local rows."""
    return torch.autograd.graph.get_gradient_edge(_rows(tensor)).node


def _rows(value: Any) -> Any:
    return value._shares[-1]._rows if isinstance(value, BatchTensor) else value
