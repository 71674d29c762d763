from __future__ import annotations

import torch
from torch import Tensor, nn

from duoka.view.tensor.graph import graph, node_of
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared


def names(nodes: object) -> list[str]:
    return [type(node).__name__ for node in nodes]  # type: ignore[attr-defined]


def leaves(outputs: list[Tensor], ends: list[Tensor]) -> list[Tensor]:
    return [node.variable for node in graph(outputs, map(node_of, ends)) if type(node).__name__ == "AccumulateGrad"]


def test_every_node_comes_once() -> None:
    weight = torch.ones(2, requires_grad=True)
    hidden = weight * 2
    found = list(graph([hidden + hidden, hidden]))
    assert len(found) == len({*found}) == 3
    assert found[-1] is not found[0]
    assert [leaf is weight for leaf in leaves([hidden + hidden, hidden], [])] == [True]


def test_what_is_behind_an_end_is_left_out() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    hidden = one * 2
    out = hidden * other
    assert [leaf is other for leaf in leaves([out], [hidden])] == [True]
    assert leaves([out], [out]) == []


def test_what_needs_no_gradient_has_no_node() -> None:
    assert list(graph([torch.ones(2), "text", None])) == []


def test_of_a_batch_the_graph_of_own_rows_in_one_order_on_all_ranks() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def on_rank(view: View) -> list[str]:
        out = layers(shared(view, torch.ones(4, 3)))
        assert node_of(out) is out.to_local().grad_fn
        return names(graph([out]))

    one, other = on_ranks(2, on_rank)
    assert one == other
    assert names(graph([layers(torch.ones(4, 3))])) == one
