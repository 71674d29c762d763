from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duoka.collectives.tree_sum import GATHERED, Tree, add_up, start_sum, subtrees
from duoka.view.view import View
from tests.view.processes import all_well, in_processes
from tests.view.ranks import on_ranks


def leaves(count: int, size: int, seed: int = 0) -> list[Tensor]:
    """Numbers of very different sizes: their sums show every order of addition."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-10, 10, (count, size), generator=generator)
    return list(torch.randn(count, size, generator=generator) * 10.0**exponents)


def paired(values: list[Tensor]) -> Tensor:
    """The definition."""
    half = len(values) // 2
    return values[0] if not half else paired(values[:half]) + paired(values[half:])


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_sums_are_those_of_the_tree(count: int) -> None:
    values = leaves(count, 50)
    before = [value.clone() for value in values]
    assert torch.equal(add_up(values), paired(values))
    assert all(torch.equal(one, other) for one, other in zip(values, before, strict=True))
    assert add_up(values).data_ptr() != values[0].data_ptr()


def test_the_order_matters_at_all() -> None:
    values = leaves(8, 200)
    assert not torch.equal(add_up(values), torch.stack(values).sum(0))


@pytest.mark.parametrize("size", [1, 7, GATHERED // 4, GATHERED // 4 + 3])
@pytest.mark.parametrize("counts", [(4, 4), (2, 2, 2, 2), (6, 2), (1, 7), (3, 5), (3, 3, 2), (1, 5, 2)])
def test_ranks_come_to_the_same_bits(counts: tuple[int, ...], size: int) -> None:
    values = leaves(8, size)

    def on_rank(view: View) -> Tensor:
        tree, rank = Tree(counts), view.ranks.rank
        own = tree.own_sums(rank, values[sum(counts[:rank]) : sum(counts[: rank + 1])])
        return start_sum(view.ranks, tree, torch.stack(own))()

    for found in on_ranks(len(counts), on_rank):
        assert torch.equal(found, paired(values))


@given(st.integers(0, 6), st.data())
def test_subtrees_are_few_and_whole(height: int, data: st.DataObject) -> None:
    leaves_in_all = 1 << height
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, leaves_in_all)] * 2)))
    nodes = subtrees(start, stop)
    covered = [leaf for h, place in nodes for leaf in range(place << h, (place + 1) << h)]
    assert covered == list(range(start, stop))
    assert len(nodes) <= max(1, 2 * height)


@pytest.mark.parametrize("nearby", [True, False])
def test_sums_between_processes_go_on_meanwhile(nearby: bool) -> None:
    values = leaves(6, 300_001)

    def work(ranks: object) -> list[bool]:
        mine = [values[2 * number + ranks.rank] for number in range(3)]  # type: ignore[attr-defined]
        sums = [start_sum(ranks, Tree((1, 1)), part[None]) for part in mine]  # type: ignore[arg-type]
        return [torch.equal(finish(), values[2 * n] + values[2 * n + 1]) for n, finish in enumerate(sums)]

    assert all_well(in_processes(2, work, nearby=nearby)) == [[True] * 3] * 2
