from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duoka.errors import Refused
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import BatchTensor, batches_in, gather_all
from duoka.view.tensor.spec import Spec
from duoka.view.view import View
from tests.view.ranks import Table, ThreadRanks, on_ranks, shared


def spec_of(rank: int, world_size: int, n: int, dim: int, outer: int, inner: int) -> Spec:
    view = View(ThreadRanks(Table(world_size), rank), adopt=lambda leaf: None)
    return Spec(view, view.partition(n), dim, outer, inner)


places = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3))
partitions = st.integers(1, 4).flatmap(lambda size: st.tuples(st.integers(size, 9), st.just(size)))


def whole_tensor(n: int, dim: int, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """A tensor with different entries, and the sample that each entry of its batch dimension belongs to."""
    sizes = [2, 3, 2]
    sizes[dim] = outer * n * inner
    samples = torch.arange(n).repeat_interleave(inner).repeat(outer)
    return torch.arange(torch.Size(sizes).numel()).view(sizes), samples


@given(partitions, places)
def test_a_rank_s_own_rows_are_those_of_its_samples(partition: tuple[int, int], place: tuple[int, int, int]) -> None:
    n, world_size = partition
    whole, samples = whole_tensor(n, *place)
    for rank in range(world_size):
        spec = spec_of(rank, world_size, n, *place)
        start, stop = Partition(n, rank, world_size).bounds(rank)
        mine = torch.nonzero((samples >= start) & (samples < stop)).flatten()
        assert spec.size == whole.shape[place[0]]
        assert spec.local_size == len(mine)
        assert torch.equal(spec.local_rows(whole), whole.index_select(place[0], mine))
        assert BatchTensor(spec.local_rows(whole), spec).shape == whole.shape


@given(partitions, places, st.sampled_from([torch.bool, torch.uint8, torch.float16, torch.float64, torch.complex64]))
def test_all_rows_are_gathered_to_where_they_were(
    partition: tuple[int, int], place: tuple[int, int, int], dtype: torch.dtype
) -> None:
    n, world_size = partition
    whole = (whole_tensor(n, *place)[0] % 7).to(dtype)

    def on_rank(view: View) -> Tensor:
        spec = Spec(view, view.partition(n), *place)
        return spec.gather(spec.local_rows(whole).clone())

    for gathered in on_ranks(world_size, on_rank):
        assert torch.equal(gathered, whole)
        assert gathered.dtype == dtype


def test_another_dimension_of_the_same_rows() -> None:
    spec = spec_of(1, 2, 5, 1, 2, 3)
    moved = spec.at(0)
    assert (moved.dim, moved.outer, moved.inner, moved.partition) == (0, 2, 3, spec.partition)
    assert spec.at(1) is spec


def test_own_rows_share_memory_where_they_lie_side_by_side() -> None:
    whole = torch.zeros(4, 3)
    spec_of(1, 2, 4, 0, 1, 1).local_rows(whole).fill_(1)
    assert whole.sum(1).tolist() == [0, 0, 3, 3]


def test_a_batch_of_what_lies_strided_holds_its_share_or_does_not_exist() -> None:
    spec = spec_of(0, 2, 5, 1, 3, 2)  # this rank's rows: 2 of 5
    assert BatchTensor(torch.zeros(4, 12), spec).shape == (4, 30)
    for wrong in (10, 18, 30):
        with pytest.raises(AssertionError, match="does not hold 12 rows in dimension 1"):
            BatchTensor(torch.zeros(4, wrong), spec)


def test_it_says_of_itself_what_the_whole_batch_is() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.zeros(5, 3, dtype=torch.float64))
        assert (len(x), x.shape, x.size(0), x.numel(), x.dim(), x.dtype) == (5, (5, 3), 5, 15, 2, torch.float64)
        assert x.to_local().shape == (view.partition(5).rows, 3)
        assert isinstance(x, Tensor)
        assert torch.is_tensor(x)
        assert not view.whole_operations

    on_ranks(2, on_rank)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda x: x.__setitem__(3, 7.0),
    "rows": lambda x: x.__setitem__(slice(1, 4), torch.ones(3, 4)),
    "one entry": lambda x: x.__setitem__((2, 1), 5.0),
    "chosen rows": lambda x: x.__setitem__(torch.tensor([4, 0]), torch.tensor([[1.0], [2.0]])),
    "a mask": lambda x: x.__setitem__(x > 9, -1.0),
    "a row of others": lambda x: x.__setitem__(0, x[4] * 2),
    "augmented rows": lambda x: _augment(x),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0, 4]), 9.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3, 1]), torch.ones(2, 4)),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([[4, 3, 2, 1]]), 8.0),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 9, torch.arange(20.0)),
    "cumsum_": lambda x: x.cumsum_(0),
    "through a view": lambda x: x.view(-1).__setitem__(slice(3, 9), 0.0),
    "through a transposed view": lambda x: x.t()[1].__setitem__(slice(1, 4), 3.0),
    "out": lambda x: torch.add(torch.ones(5, 4), 1, out=x),
    "out of a rule": lambda x: torch.cumsum(x, 1, out=x),
    "one of several": lambda x: torch.sort(x * -1, dim=1, out=(x, torch.empty(0, dtype=torch.long))),
    "a list of tensors": lambda x: torch._foreach_add_([x, torch.ones(2)], 1.0),
    "data": lambda x: setattr(x, "data", x.data.clamp(3, 8)),
    "data by a plain tensor": lambda x: setattr(x, "data", torch.full((5, 4), 2.0)),
    "into data": lambda x: x.data.__setitem__((slice(None), 1), 4.0),
    "rows of data": lambda x: x.data.__setitem__(2, 4.0),
    "every second column": lambda x: x[:, ::2].mul_(3),
    "a diagonal": lambda x: x.fill_diagonal_(7),
    "a row by itself": lambda x: x[1].fill_(1),
    "a row by a name": lambda x: x.select(0, 1).zero_(),
    "rows by themselves": lambda x: x[1:3].mul_(2),
    "an entry of a row": lambda x: x[1].__setitem__(2, 5),
    "rows one by one": lambda x: [row.add_(1) for row in x],
    "pieces": lambda x: x.chunk(2)[1].zero_(),
    "a row, and another was taken since": lambda x: _first_of(x[0], x[1]).fill_(3),
    "a row, and the batch was read since": lambda x: _first_of(x[0], x.sum().item()).fill_(3),
    "a row of a view": lambda x: x.view(-1)[3:9].fill_(2),
    "a row of a transposed view": lambda x: x.t()[1][1:4].fill_(3),
    "a row of data": lambda x: x.data[3].fill_(2),
    "a row of what is detached": lambda x: x.detach()[3].fill_(2),
    "a row twice": lambda x: [row.add_(1) for row in (x[1], x[1])],
    "two rows": lambda x: [row.fill_(value) for value, row in enumerate((x[0], x[3]))],
    "a row, then the batch": lambda x: _first_of(x[1], x.add_(1)).mul_(2),
    "a row, then the batch, while another is held": lambda x: _first_of(x[1], x[3], x.add_(1)).mul_(2),
    "a row, then a view of the batch": lambda x: _first_of(x[1], x.view(-1).add_(1)).mul_(2),
    "an array": lambda x: x.numpy().__setitem__(2, 5),
    "a row of an array": lambda x: x.numpy()[1].fill(5),
    "an array of a view": lambda x: x.detach().cpu().view(-1).numpy().__setitem__(slice(3, 9), 5),
    "asarray": lambda x: np.asarray(x).__imul__(2),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(2),
    "an array of a row": lambda x: x[1].numpy().fill(5),
    "plain threshold in place": lambda x: torch.nn.functional.threshold(x, 5.0, 0.5, inplace=True),
}


def _augment(x: Tensor) -> None:
    x[1:3] += 5
    x[x > 9] *= 2
    x[0] /= 2


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_written_into_a_batch_is_in_it(write: Callable[[Tensor], Any], world_size: int) -> None:
    start = torch.arange(20.0).view(5, 4)
    expected = start.clone()
    write(expected)

    def on_rank(view: View) -> Tensor:
        x = shared(view, start)
        write(x)
        return x.full_tensor()

    for whole in on_ranks(world_size, on_rank):
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("write", [lambda x: x.unsqueeze_(0), lambda x: x.squeeze_(), lambda x: x.t_()])
@pytest.mark.parametrize("shape", [(2, 1), (3, 3), (2, 3)])
def test_a_shape_changed_in_place_is_changed_or_an_error(
    write: Callable[[Tensor], Any], shape: tuple[int, int]
) -> None:
    start = torch.arange(6.0)[: shape[0] * shape[1]].view(shape) if shape != (3, 3) else torch.arange(9.0).view(3, 3)
    expected = start.clone()
    write(expected)

    def on_rank(view: View) -> bool:
        x = shared(view, start)
        try:
            write(x)
        except (Refused, RuntimeError):
            return True
        return torch.equal(x.full_tensor(), expected) and x.shape == expected.shape

    assert all(on_ranks(2, on_rank))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.set_(torch.ones(5, 4)),
        lambda x: torch.ops.aten.set_(x, torch.ones(5, 4)),
        lambda x: torch.ops.aten.as_strided(x[:, 1:], [5, 4], [4, 1], 0),
        lambda x: x.resize_(2, 2),
        lambda x: torch.add(torch.ones(2, 2), 1, out=x),
        lambda x: setattr(x, "data", torch.ones(5, 5)),
        lambda x: x.share_memory_(),
        lambda x: x.is_set_to(x),
        lambda x: setattr(x, "_backward_hooks", None),
    ],
    ids=[
        "set_",
        "set_operator",
        "as_strided",
        "resize_",
        "out",
        "data",
        "share_memory_",
        "is_set_to",
        "an_attribute",
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_cannot_be_written_is_refused(write: Callable[[Tensor], Any]) -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.zeros(5, 4))
        with pytest.raises(Refused, match=r"test_batch\.py") as refused:
            write(x)
        assert view.refusal is refused.value

    on_ranks(2, on_rank)


def _first_of(*values: Any) -> Any:
    return values[0]


def test_a_deep_copy_has_memory_of_its_own() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.ones(5, 4))
        other = copy.deepcopy({"x": [x]})["x"][0]
        assert isinstance(other, BatchTensor)
        other.mul_(2)
        assert (x.sum(), other.sum()) == (20, 40)
        assert other.to_local().data_ptr() != x.to_local().data_ptr()

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    "travel",
    [
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: pickle.loads(pickle.dumps({"a": [x]}, protocol=5))["a"][0],
        lambda x: _saved(x),
    ],
    ids=["pickle", "protocol 5", "save"],
)
def test_a_pickled_batch_is_the_plain_tensor_of_all_rows(travel: Callable[[Tensor], Any]) -> None:
    whole = torch.arange(20.0).view(5, 4)

    def on_rank(view: View) -> None:
        found = travel(shared(view, whole))
        assert type(found) is Tensor
        assert torch.equal(found, whole)

    on_ranks(2, on_rank)


def _saved(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(gather_all(x), file)
    file.seek(0)
    return torch.load(file)


def test_batches_in_nested_containers() -> None:
    def on_rank(view: View) -> None:
        x, y = shared(view, torch.ones(4)), shared(view, torch.zeros(4))
        tree = {"a": [x, 1], "b": (torch.ones(2), {"c": y})}
        assert [id(batch) for batch in batches_in(tree)] == [id(x), id(y)]
        whole = gather_all(tree)
        assert not batches_in(whole)
        assert torch.equal(whole["a"][0], torch.ones(4))
        assert whole["a"][1] == 1
        assert torch.equal(whole["b"][1]["c"], torch.zeros(4))

    on_ranks(2, on_rank)


def test_what_is_gathered_is_counted_by_operation_and_line() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(8.0).view(4, 2))
        for _ in range(3):
            x.flip(0)
        (name, where), times = next(iter(view.whole_operations.items()))
        assert (name, times) == ("flip", 3)
        assert where.startswith("test_batch.py:")
        assert len(view.whole_operations) == 1

    on_ranks(2, on_rank)
