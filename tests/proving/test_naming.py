from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from duoka.proving.naming import TensorNames

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
