from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from duoka.proving import recorder
from duoka.proving.recorder import Nudge, TensorNames


def test_every_number_moves_by_its_last_place_once() -> None:
    model = nn.Linear(100, 50)
    with torch.no_grad():
        model.weight[0, 0] = 0.0
    before = model.weight.detach().clone()
    state = torch.get_rng_state()
    mover = Nudge(0)
    mover.move(model.parameters())
    moved = model.weight.detach().clone()
    mover.move(model.parameters())
    assert torch.equal(model.weight, moved)
    assert torch.equal(torch.get_rng_state(), state)
    apart = (moved - before).abs() / before.abs()
    assert moved[0, 0] == 0
    assert apart[1:].min() > 0
    assert apart[1:].max() <= 2 * torch.finfo(torch.float32).eps
    assert 0.4 < (moved > before).double().mean() < 0.6


def test_two_seeds_move_otherwise() -> None:
    first, second = (torch.ones(100).requires_grad_() for _ in range(2))
    Nudge(0).move([first])
    Nudge(1).move([second])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_a_coarse_type_some_numbers_move_by_its_last_place(autocast: bool) -> None:
    weight = torch.ones(10_000, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        Nudge(0).move([weight])
    moved = weight.double() != 1
    assert 0.5 * recorder.SOME < moved.double().mean() < 2 * recorder.SOME
    assert (weight.double()[moved] - 1).abs().max() == torch.finfo(torch.bfloat16).eps


def test_whole_numbers_stay() -> None:
    counter = torch.ones(3, dtype=torch.int64)
    Nudge(0).move([counter])
    assert counter.tolist() == [1, 1, 1]


EARLIER: list[Tensor] = []  # of models that other tests of this process have left


@pytest.fixture(autouse=True)
def earlier() -> Iterator[None]:
    gc.collect()
    EARLIER[:] = [entry for entry in gc.get_objects() if isinstance(entry, Tensor)]
    yield
    EARLIER.clear()


def is_new(tensor: Tensor) -> bool:
    return all(tensor is not other for other in EARLIER)


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def names(self) -> dict[str, bool]:
        return found(self.optimizer)


def found(*optimizers: torch.optim.Optimizer) -> dict[str, bool]:
    """Return the names found, and True for buffers."""
    names = TensorNames()
    for optimizer in optimizers:
        names.number(optimizer)
    return {name: kind == "buffer" for name, tensor, kind in names.tensors() if is_new(tensor)}


def test_a_model_is_called_what_the_script_calls_it() -> None:
    model = nn.Linear(2, 1)
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    frozen = nn.Linear(3, 3)
    assert found(optimizer) == {"wrapped.weight": False, "wrapped.bias": False}
    del frozen


def test_models_in_objects_lists_and_dicts() -> None:
    assert "self.net.0.weight" in Trainer().names()
    assert Trainer().names()["self.net.1.running_mean"]
    nets = {"G": nn.Linear(1, 1, bias=False), "D": nn.Linear(1, 1, bias=False)}
    parts = [nn.Linear(1, 1, bias=False)]
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in (*nets.values(), *parts)]
    assert set(found(*optimizers)) == {"nets['G'].weight", "nets['D'].weight", "parts[0].weight"}


def test_a_copied_model_and_one_without_a_name() -> None:
    optimizer = torch.optim.SGD(copy.deepcopy(nn.Linear(2, 2)).parameters(), lr=0.1)
    holder = [[optimizer.param_groups[0]["params"]]]
    assert set(found(optimizer)) == {"optimizer 0 group 0 parameter 0", "optimizer 0 group 0 parameter 1"}
    del holder


def test_parameters_in_no_model_keep_their_place() -> None:
    model, scale = nn.Linear(2, 1, bias=False), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [scale]}], lr=0.1)
    assert set(found(optimizer)) == {"model.weight", "optimizer 0 group 1 parameter 0"}


def test_a_model_that_is_given_up_is_not_there_any_longer() -> None:
    names = TensorNames()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert names.number(optimizer) == 0
    assert sum(is_new(tensor) for _, tensor, _ in names.tensors()) == 2
    del model, optimizer
    other = nn.Linear(2, 1, bias=False)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    assert names.number(second) == 1
    assert [name for name, tensor, _ in names.tensors() if is_new(tensor)] == ["other.weight"]
