from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from duoka.view.batch import BatchTensor
from duoka.view.call import Call, Writing, dimension_of, leads_in
from duoka.view.view import View
from tests.view.ranks import on_ranks


def call(function: Any, *args: Any) -> Call:
    leaves, tree = tree_flatten((args, {}))
    batch = next((leaf for leaf in leaves if isinstance(leaf, BatchTensor)), None)
    return Call(lambda module, *given: function(*given), nn.Identity(), leaves, tree, batch)


@given(n=st.integers(4, 12), ranks=st.integers(1, 4), dim=st.integers(0, 1), size=st.integers(1, 3))
def test_rows_of_all_ranks_in_order_are_the_batch(n: int, ranks: int, dim: int, size: int) -> None:
    shape = [size, size]
    shape[dim] = n
    whole, other = torch.arange(n * size).reshape(shape), torch.ones(n + 1)

    def rows(view: View) -> list[Any]:
        one = call(None, BatchTensor.of(whole, view, dim), whole, other, "word")
        cut = one.cut(view, None)
        assert cut is not None
        return one.rows(view, cut, (dim, dim, None, None))

    found = on_ranks(ranks, rows)
    for column in zip(*found, strict=True):
        if isinstance(column[0], Tensor) and column[0] is not other:
            assert torch.equal(torch.cat(column, dim), whole)
    assert all(other is one[2] and one[3] == "word" for one in found)


def test_a_part_of_a_rank_s_rows() -> None:
    def rows(view: View) -> tuple[int, ...]:
        one = call(None, BatchTensor.of(torch.arange(9), view, 0))
        cut = one.cut(view, None)
        assert cut is not None
        return tuple(one.rows(view, cut, (0,), (1, 3))[0].tolist())

    assert on_ranks(2, rows) == [(1, 2), (5, 6)]


@pytest.mark.parametrize(
    ("leaves", "around", "leads"),
    [
        ([3, torch.ones(8, 5)], None, ((1, 0), (1, 1))),  # batch-first or not: to be found out
        ([torch.ones(8, 1)], None, ((0, 0),)),
        ([torch.ones(1, 8)], None, ()),  # a batch of one: too small to be shared out, whatever comes second
        ([torch.ones(5, 8), torch.ones(8)], 8, ((1, 0),)),
        ([nn.Parameter(torch.ones(8, 8)), torch.tensor(8)], None, ()),
    ],
)
def test_where_a_batch_could_be_that_was_cut_by_hand(leaves: list[Any], around: int | None, leads: Any) -> None:
    assert on_ranks(2, lambda view: leads_in(view, leaves, around)) == [leads] * 2


def test_the_dimension_of_so_many_entries() -> None:
    assert [dimension_of(leaf, 5) for leaf in (torch.ones(3, 5), torch.ones(3), nn.Parameter(torch.ones(5)), 5)] == [
        1,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("write", [lambda x, some: x.zero_(), lambda x, some: some.append(x)])
def test_a_call_that_writes_into_its_inputs_is_not_tried_out(write: Any) -> None:
    one = call(write, torch.ones(2), [torch.ones(2)])
    with pytest.raises(Writing):
        one.try_out(list(one.leaves))
