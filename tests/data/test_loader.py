"""run.loader on real ranks, compared with torch's DataLoader in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
    random_split,
)

import duoka
from duoka.view.tensor.batch import BatchTensor, gather_all
from tests.run.ranks import each_on_ranks, on_ranks


class Squares(Dataset[Any]):
    """Samples of a number, a vector and a word."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(index)), index**2


class Named(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "name": f"sample {index}"}


class Stream(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(torch.arange(self.n).float(), range(self.n), strict=True))


class Divided(Stream):
    """An iterable dataset that each loader worker divides unevenly."""

    def __iter__(self) -> Iterator[Any]:
        told = get_worker_info()
        first, step = (0, 1) if told is None else (told.id, told.num_workers)
        return itertools.islice(super().__iter__(), first, None, step)


def padded(samples: list[Any]) -> dict[str, Tensor]:
    """Collate sequences to another length in every batch, with one tensor that is not by sample."""
    lengths = torch.tensor([int(number) % 5 + 1 for _, number in samples])
    rows = torch.zeros(len(samples), int(lengths.max()))
    for row, length, (_, number) in zip(rows, lengths, samples, strict=True):
        row[:length] = number
    return {"rows": rows, "lengths": lengths, "longest": lengths.max()}


def plain(batches: Any) -> list[Any]:
    """Batches as lists of numbers, whole."""
    return [tree_map_only(Tensor, lambda t: t.tolist(), gather_all(batch)) for batch in batches]


LOADERS: dict[str, Any] = {
    "in memory": lambda: DataLoader(TensorDataset(torch.arange(23.0), torch.arange(23)), 5, shuffle=True),
    "a subset": lambda: DataLoader(random_split(TensorDataset(torch.arange(30)), [19, 11])[0], 4, shuffle=True),
    "dropping": lambda: DataLoader(TensorDataset(torch.arange(23.0)), 5, drop_last=True),
    "replacement": lambda: DataLoader(
        TensorDataset(torch.arange(9)), 4, sampler=RandomSampler(range(9), replacement=True, num_samples=13)
    ),
    "a dataset": lambda: DataLoader(Squares(23), 5, shuffle=True),
    "words": lambda: DataLoader(Named(23), 5, shuffle=True),
    "workers": lambda: DataLoader(Squares(23), 5, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(Squares(23), 5, shuffle=True, num_workers=1, persistent_workers=True),
    "a generator": lambda: DataLoader(Squares(23), 5, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "batch sampler": lambda: DataLoader(Squares(23), batch_sampler=[[3, 4, 5], [9, 1], [7], list(range(8))]),
    "collated": lambda: DataLoader(Squares(23), 5, shuffle=True, collate_fn=padded),
    "a stream": lambda: DataLoader(Stream(23), 5),
    "a stream, collated": lambda: DataLoader(Stream(23), 5, collate_fn=padded, drop_last=True),
    "a stream, workers": lambda: DataLoader(Divided(23), 5, num_workers=2),
    "not batched": lambda: DataLoader(Squares(5), batch_size=None),
}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_the_batches_of_a_data_loader(world_size: int) -> None:
    expected = {}
    for name, made in LOADERS.items():
        torch.manual_seed(0)
        loader = made()
        expected[name] = [([plain(loader) for _ in range(2)], torch.rand(1).item(), True)] * world_size

    def work(run: duoka.Run, made: Callable[[], Any]) -> Any:
        loader = run.loader(made())
        return [plain(loader) for _ in range(2)], torch.rand(1).item(), len(list(loader)) > 0

    assert each_on_ranks(world_size, {name: partial(work, made=made) for name, made in LOADERS.items()}) == expected


def test_batches_are_shared_out() -> None:
    def work(run: duoka.Run) -> Any:
        loaders = [
            run.loader(LOADERS[name]()) for name in ("in memory", "a dataset", "words", "collated", "a stream")
        ]
        firsts = [tree_leaves(next(iter(loader)))[0] for loader in loaders]
        return [type(first) is BatchTensor and len(first.to_local()) for first in firsts]

    assert on_ranks(2, work) == [[2] * 5, [3] * 5]


def test_made_of_tensors_and_arrays() -> None:
    def work(run: duoka.Run) -> Any:
        loader = run.loader((torch.arange(6.0), np.arange(6)), batch_size=4)
        return loader.batch_size, len(loader), plain(loader)

    batches = [[[0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3]], [[4.0, 5.0], [4, 5]]]
    assert on_ranks(2, work) == [(4, 2, batches)] * 2


class Noisy(Dataset[Any]):
    """A dataset that draws random numbers when read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1) + index


def test_augmentation() -> None:
    torch.manual_seed(0)
    expected = [plain(DataLoader(Noisy(), 4)) for _ in range(2)]

    def work(run: duoka.Run) -> Any:
        loader = run.loader(Noisy(), batch_size=4)
        return [plain(loader) for _ in range(2)]

    assert on_ranks(2, work) == [expected] * 2  # every rank reads all of it
    two, three = on_ranks(2, work, loading="shared"), on_ranks(3, work, loading="shared")
    assert two[0] == two[1]
    assert two[0][1][1] == three[0][1][1] != expected[1][1]


# --- pieces

X, Y = torch.randn(23, 4, generator=torch.Generator().manual_seed(1)), torch.arange(23.0)


def gradients(run: duoka.Run, in_pieces: bool, **how: Any) -> list[Any]:
    """Return the gradients of two models after every batch, of a mean loss."""
    one, two = run.model(nn.Linear(4, 1)), run.model(nn.Linear(4, 1))
    found = []
    for batch in run.loader((X, Y), batch_size=10, **how):
        pieces = batch if in_pieces else [batch]
        for number, (x, y) in enumerate(pieces):
            score = one(x) if number == 0 else one(x) + two(x)  # not all pieces reach all parameters
            loss = (score.squeeze(1) - y).square().mean()
            (loss * (batch.weight if in_pieces else 1)).backward()
        found.append([[] if p.grad is None else p.grad.tolist() for m in (one, two) for p in m.parameters()])
        one.zero_grad()
        two.zero_grad()
    return found


@pytest.mark.parametrize("how", [{"accumulate": 3}, {"micro_batch": 4}, {"accumulate": 3, "shuffle": True}], ids=str)
def test_pieces_add_up(how: dict[str, Any]) -> None:
    expected = on_ranks(1, lambda run: gradients(run, True, **how))[0]
    for found in on_ranks(3, lambda run: gradients(run, True, **how)):
        assert tree_leaves(found) == pytest.approx(tree_leaves(expected), rel=1e-4, abs=1e-4)


def test_one_piece_is_the_batch() -> None:
    def work(run: duoka.Run) -> Any:
        weight = run.model(nn.Linear(4, 1, bias=False)).weight
        sums = []
        for how in ({}, {"micro_batch": 3}, {"accumulate": 4}, {"accumulate": 99}):
            weight.grad = None
            batch = next(iter(run.loader((X, Y), batch_size=11, **how)))
            for x, y in batch if how else [batch]:
                loss = ((x @ weight.t()).squeeze(1) - y).square().mean()
                (loss * (batch.weight if how else 1)).backward()
            sums.append(weight.grad.tolist())
        return [torch.allclose(torch.tensor(one), torch.tensor(sums[0]), rtol=1e-4) for one in sums]

    assert on_ranks(2, work) == [[True] * 4] * 2


def test_pieces_that_are_left_out() -> None:
    def work(run: duoka.Run) -> Any:
        loader = run.loader((X, torch.arange(23)), batch_size=10, accumulate=3)
        return [[gather_all(y).tolist() for _, y in itertools.islice(batch, 1)] for batch in loader]

    assert on_ranks(2, work)[0] == [[[0, 1, 2]], [[10, 11, 12]], [[20]]]


# --- going on


@pytest.mark.parametrize("before", [1, 3])
def test_going_on_at_the_next_batch(before: int) -> None:
    hows: dict[str, dict[str, Any]] = {"plain": {}, "workers": {"num_workers": 1}, "pieces": {"accumulate": 2}}

    def order(loader: Any, how: dict[str, Any]) -> Iterator[Any]:
        for batch in loader:
            yield [gather_all(piece[0]).tolist() for piece in batch] if how.get("accumulate") else plain([batch])

    def begin(run: duoka.Run, how: dict[str, Any]) -> Any:
        loader = run.loader((torch.arange(37),), batch_size=5, shuffle=True, **how)
        list(order(loader, how))
        seen, rest = order(loader, how), []
        for _ in range(3):
            next(seen)
        state = loader.state_dict()
        rest = [*seen, *order(loader, how)]
        return state, rest, loader.epoch

    def go_on(run: duoka.Run, how: dict[str, Any], state: Any) -> Any:
        torch.rand(7)  # another place in the stream of random numbers
        workers = 0 if how.get("num_workers") else 2
        loader = run.loader((torch.arange(37),), batch_size=5, shuffle=True, **how | {"num_workers": workers})
        loader.load_state_dict(state)
        return list(order(loader, how)), loader.epoch

    begun = each_on_ranks(before, {name: partial(begin, how=how) for name, how in hows.items()})
    works = {name: partial(go_on, how=how, state=begun[name][0][0]) for name, how in hows.items()}
    for world_size in (1, 2):
        for name, ranks in each_on_ranks(world_size, works).items():
            state, rest, epoch = begun[name][0]
            assert (state["epoch"], state["batch"], epoch) == (1, 3, 3), name
            assert ranks[0] == (rest[:5], 2), name


def test_going_on_with_pieces_of_batches_of_all_sizes() -> None:
    def work(run: duoka.Run) -> Any:
        first, again = (run.loader(LOADERS["batch sampler"](), micro_batch=2) for _ in range(2))
        batches = iter(first)
        for _ in range(2):
            next(batches)
        again.load_state_dict(first.state_dict())
        return [[plain([piece])[0][1] for piece in batch] for batch in again]

    assert on_ranks(2, work)[0] == [[[49]], [[0, 1], [4, 9], [16, 25], [36, 49]]]


# --- what is refused


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size must be a whole number"),
    ({"batch_size": -3}, "batch_size must be a whole number"),
    ({"batch_size": None}, "batch_size must be a whole number"),
    ({"shuffle": True, "sampler": [1, 2]}, "shuffle=True and a sampler"),
    ({"accumulate": 0}, "accumulate must be a whole number"),
    ({"accumulate": 2, "micro_batch": 2}, "given one of both"),
    ({"workers": 2}, "workers"),
    ({"data": 3}, "must be a dataset"),
    ({"data": (torch.ones(3), torch.ones(4))}, "equal numbers of rows"),
    ({"data": DataLoader(Squares(4))}, "one or the other"),
]


def test_what_is_refused() -> None:
    def one(run: duoka.Run, how: dict[str, Any]) -> Any:
        data = how.get("data", torch.arange(7.0))
        options = {"batch_size": 3} | {key: value for key, value in how.items() if key != "data"}
        try:
            run.loader(data, **options)
        except duoka.OptionError as error:
            return str(error)

    for said in on_ranks(3, lambda run: [one(run, how) for how, _ in REFUSED]):
        assert [text in found for found, (_, text) in zip(said, REFUSED, strict=True)] == [True] * 10, said


def test_a_sampler_that_shares_out_is_refused() -> None:
    def work(run: duoka.Run) -> Any:
        sampler = torch.utils.data.DistributedSampler(range(8), run.world_size, run.rank)
        with pytest.raises(duoka.OptionError, match="leave it out"):
            run.loader(DataLoader(Squares(8), sampler=sampler))

    on_ranks(2, work)


def test_hooks_are_called_when_a_batch_is_done_with() -> None:
    def work(run: duoka.Run) -> Any:
        loader, seen = run.loader(torch.arange(7), batch_size=3), []
        loader.register_step_hook(lambda: seen.append(("hook", loader.state_dict()["batch"])))
        for batch in loader:
            seen.append(("batch", len(batch[0])))
        return seen

    expected = [("batch", 3), ("hook", 1), ("batch", 3), ("hook", 2), ("batch", 1), ("hook", 3)]
    assert on_ranks(2, work) == [expected] * 2


def test_a_state_at_the_end_of_an_epoch() -> None:
    def work(run: duoka.Run) -> Any:
        first, again = (run.loader(torch.arange(7), batch_size=3, shuffle=True) for _ in range(2))
        states: list[Any] = []
        first.register_step_hook(lambda: states.append(first.state_dict()))
        list(first)
        again.load_state_dict(states[-1])
        return len(list(again)), again.epoch, len(list(again)), again.epoch

    assert on_ranks(2, work) == [(0, 1, 3, 2)] * 2


@pytest.mark.parametrize("name", ["in memory", "a dataset"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_iteration_within_another(name: str, world_size: int) -> None:
    def batches(loader: Any) -> list[Any]:
        found = []
        for at, batch in enumerate(loader):
            found += [batch, next(iter(loader))] if at == 1 else [batch]
        return plain([*found, *itertools.chain.from_iterable(zip(loader, loader, strict=True))])

    torch.manual_seed(3)
    expected = batches(LOADERS[name]())

    def on_rank(run: duoka.Run) -> Any:
        loader = run.loader(LOADERS[name]())
        torch.manual_seed(3)
        found = batches(loader)
        for at, _ in enumerate(loader):
            next(iter(loader))
            assert loader.state_dict()["batch"] == at + 1
        return found

    assert on_ranks(world_size, on_rank) == [expected] * world_size
