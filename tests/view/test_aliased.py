from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared

HELD: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda x: x[3],
    "a row of a view": lambda x: x.view(-1)[3:9],
    "rows": lambda x: list(x),
    "an array": lambda x: x.numpy(),
    "an array of what is detached": lambda x: x.detach().cpu().numpy(),
    "a part of an array": lambda x: x.numpy()[1:, 2],
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "by an operator": lambda x: x.__imul__(2),
    "a column": lambda x: x.__setitem__((slice(None), 2), 7.0),
    "a row": lambda x: x.__setitem__(3, 7.0),
    "through a view": lambda x: x.view(-1).zero_(),
    "through data": lambda x: x.data.add_(3),
    "through data, one row": lambda x: x.data.__setitem__(4, 3.0),
    "random numbers": lambda x: x.uniform_(5, 5),
    "a layer in place": lambda x: torch.nn.functional.relu(x.sub_(10), inplace=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_what_is_held_of_a_batch_changes_with_it(
    hold: Callable[[Tensor], Any], change: Callable[[Tensor], Any]
) -> None:
    def values(x: Tensor) -> list[float]:
        held = hold(x)
        change(x)
        return np.array([np.asarray(part) for part in held]).tolist()  # type: ignore[no-any-return]

    start = torch.arange(20.0).view(5, 4)
    expected = values(start.clone())
    assert on_ranks(2, lambda view: values(shared(view, start))) == [expected] * 2


def test_data_that_was_taken_before_is_the_same_memory() -> None:
    def sums(x: Tensor) -> list[float]:
        data = x.data
        row, array = x[3], x.numpy()
        data.add_(1)
        found = [float(row.sum()), float(array.sum()), x.sum().item()]
        data[3] = 0
        found += [float(row.sum()), x.sum().item()]
        row.fill_(2)
        array[0] = 1
        return [*found, data.sum().item(), x.sum().item()]

    start = torch.arange(20.0).view(5, 4)
    expected = sums(start.clone())
    assert on_ranks(2, lambda view: sums(shared(view, start))) == [expected] * 2


def test_rows_taken_and_only_read_are_no_matter() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4))
        first, rest = x[0], x[1:]
        assert first.sum() + rest.sum() == x.sum() == 190
        copied = x[0].clone()
        copied.fill_(9)
        assert x.sum() == 190

    on_ranks(2, on_rank)


def test_what_nobody_holds_is_forgotten() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4))
        rows = [x[0], x[1], x.numpy()]
        assert len(view.aliased.copies) == 1  # they are of one copy
        del rows
        x.sum()
        assert not view.aliased.is_active  # here; another rank may hold it, so all forget it at the next write
        x.add_(0)
        assert not view.aliased.copies
        row = x[0]
        del x
        gc.collect()
        shared(view, torch.ones(4)).sum()
        assert not view.aliased.copies
        assert row.tolist() == [0, 1, 2, 3]

    on_ranks(2, on_rank)


def test_not_a_number_is_no_write() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.tensor([[1.0], [float("nan")], [3.0], [4.0]]))
        array, before = x.numpy(), x._rows._version
        x.sum()
        assert np.isnan(array[1])
        array[0] = 5
        assert x[0].item() == 5
        assert x._rows._version == before  # torch does not see it on one device either

    on_ranks(2, on_rank)


def test_in_inference_mode() -> None:
    def on_rank(view: View) -> None:
        with torch.inference_mode():
            x = shared(view, torch.arange(20.0).view(5, 4)) * 1
            assert x[3].tolist() == [12, 13, 14, 15]
            x[1].fill_(0)
            x[2] = 1
            array = x.numpy()
            array[0] = 0
            assert x.sum() == 4 + sum(range(12, 20))

    on_ranks(2, on_rank)


def test_a_loop_that_writes_row_by_row_gathers_once() -> None:
    places, values = torch.randint(0, 4, (6, 4)), torch.rand(6, 4)
    expected = torch.zeros(6, 4)
    for i in range(6):
        expected[i].index_add_(0, places[i], values[i])

    def loop(view: View) -> tuple[int, Tensor]:
        written, at, added = shared(view, torch.zeros(6, 4)), shared(view, places), shared(view, values)
        for i in range(6):
            written[i].index_add_(0, at[i], added[i])
        begun = view.ranks.begun
        return begun, written.full_tensor()

    for begun, whole in on_ranks(2, loop):
        assert begun == 3  # of each batch once
        torch.testing.assert_close(whole, expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x[:],
    "flat": lambda x: x.view(-1),
    "flat rows": lambda x: x.view(-1, 4),
    "transposed": lambda x: x.transpose(1, 2),
    "samples last": lambda x: x.movedim(0, -1),
    "one place": lambda x: x[:, 1],
    "a column": lambda x: x[..., 2],
    "some": lambda x: x[:, 1:, ::2],
    "some flat": lambda x: x[:, :2].flatten(1),
}


@pytest.mark.parametrize("first", VIEWS)
def test_arrays_of_two_views_are_of_one_memory(first: str) -> None:
    def values(x: Tensor, second: str) -> Any:
        one = VIEWS[first](x).numpy()
        other = VIEWS[second](x).numpy()
        one[...] = np.arange(100, 100 + one.size).reshape(one.shape)
        found = [other.tolist(), x.sum().item(), other.tolist()]
        other += 3
        return [*found, one.tolist(), x.sum().item()]

    start = torch.arange(60.0).view(5, 3, 4)
    for second in VIEWS:
        expected = values(start.clone(), second)
        found = on_ranks(2, lambda view, second=second: values(shared(view, start), second))  # type: ignore[misc]
        assert found == [expected] * 2, second


TWO_VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a column, then a row": lambda x: (x[:, 1][0], x[0]),
    "two columns": lambda x: (x[:, 1][2], x[:, :2][2]),
    "two steps of samples last": lambda x: (x.movedim(0, 1)[1][2], x.movedim(0, 1)[:2, 2]),
    "another type": lambda x: (x[:, 1:][3], x.view(torch.int32)[3]),
    "with and without gradients": lambda x: (x.requires_grad_()[:, 1][0], x.detach()[0]),
    "with gradients": lambda x: (x.requires_grad_()[:, 1][0], x[0]),
}


@pytest.mark.parametrize("rows", TWO_VIEWS.values(), ids=TWO_VIEWS)
def test_rows_of_two_views_are_of_one_memory(rows: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def values(x: Tensor) -> Any:
        one, other = rows(x)
        found = [one.data_ptr() - other.data_ptr(), one.storage_offset(), other.storage_offset()]
        found += [one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()]
        with torch.no_grad():
            one.fill_(7)
            found += [other.tolist(), x.sum().item(), other.tolist()]
            other += 3
            found += [one.tolist(), x.sum().item()]
            x.sub_(1)
        return [*found, one.tolist(), other.tolist()]

    start = torch.arange(60.0).view(5, 3, 4)
    expected = values(start.clone())
    assert on_ranks(2, lambda view: values(shared(view, start))) == [expected] * 2


def test_a_copy_that_is_no_longer_held_is_not_extended() -> None:
    def on_rank(view: View) -> int:
        x = shared(view, torch.arange(60.0).view(5, 3, 4))
        assert [x[:, step][0].sum().item() for step in range(3)] == [6, 22, 38]
        (known,) = view.aliased.copies
        return known.full.numel()

    assert on_ranks(2, on_rank) == [20, 20]


def test_a_row_written_in_a_loop_over_two_views() -> None:
    def total(x: Tensor) -> tuple[float, float]:
        found = 0.0
        for i in range(len(x)):
            row, square = x[i], x.view(-1, 2, 2)[i]
            row.mul_(2)
            square[0, 0] = 7
            found += float(row.sum() + square.sum())
        return found, x.sum().item()

    start = torch.arange(20.0).view(5, 4)
    expected = total(start.clone())
    assert on_ranks(2, lambda view: total(shared(view, start))) == [expected] * 2


def test_a_copy_that_a_refused_function_has_resized_is_forgotten() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4))
        array = x[1].numpy()
        array += 1
        with pytest.raises(Refused, match="change a batch's shape"):
            x.resize_(3)
        assert not view.aliased.copies
        assert x.tolist() == torch.arange(20.0).view(5, 4).index_add(0, torch.tensor([1]), torch.ones(1, 4)).tolist()

    on_ranks(3, on_rank)


def test_arrays_whose_batches_are_gone() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4))
        column, array = x[:, 1].numpy(), x.numpy()
        assert len(view.aliased.copies) == 1
        del x
        shared(view, torch.ones(4)).sum()
        assert not view.aliased.copies
        column[:] = 3
        assert array[:, 1].tolist() == [3] * 5

    on_ranks(2, on_rank)


def test_a_copy_that_one_rank_has_not_collected_decides_about_no_collective() -> None:
    """Garbage collection runs on one rank only: the ranks still make the same collective calls."""

    class Node:
        def __init__(self, row: Tensor) -> None:
            self.row, self.me = row, self

    def on_rank(view: View) -> tuple[float, int]:
        x = shared(view, torch.arange(20.0).view(5, 4))
        for step in range(4):
            node: Any = Node(x[step])
            if view.ranks.rank == 0:
                node.me = None  # is gone at once
            del node
            x.mul_(2)
            x.sum()
        return x[1].sum().item(), view.ranks.begun

    gc.disable()
    try:
        found = on_ranks(2, on_rank)
    finally:
        gc.enable()
    assert found[0] == found[1]
    assert found[0][0] == 22 * 16
