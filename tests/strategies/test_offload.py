"""`cpu_offload`: parts of parameters stay in the host's memory, and blocks are gathered on another device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from tests.run.ranks import on_ranks
from tests.view import other_device

X = torch.randint(0, 11, (30, 5), generator=torch.Generator().manual_seed(1))
# torch 2.13 has devices that are written in Python; the versions before may not.
needs_other_device = pytest.mark.skipif(other_device.setup is None, reason="this torch has no devices in Python")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """Tied weights, a buffer, a parameter that stays whole, and a tensor made from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 12), nn.Linear(12, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.embedding.weight
        self.factor = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale * self.factor + self.head.weight.new_zeros(1)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flip(1).flatten())


def batches(run: duoka.Run | None) -> list[Tensor]:
    loader: Any = X.split(10) if run is None else (x for (x,) in run.loader((X,), batch_size=10))
    return list(loader)


def trained(run: duoka.Run | None, device: str) -> Any:
    """Train with what scripts do with parameters; returns printed numbers, and the model and its optimizer."""
    torch.manual_seed(0)
    model = Net() if run is None else run.model(Net(), strategy="fsdp")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average, out = copy.deepcopy(model), []
    for number, x in enumerate(batches(run)):
        x = x.to(next(model.parameters()).device)
        optimizer.zero_grad()
        loss = loss_of(model, x) + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())
        loss.backward()
        out += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        if number == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model.load_state_dict({name: value.cpu() * 0.9 for name, value in model.state_dict().items()})
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)
                parameter.add_(torch.full(tuple(parameter.shape), 1e-4, device=device))
    return out, model, optimizer, average


def numbers(run: duoka.Run | None, device: str) -> list[float]:
    out, model, _, average = trained(run, device)
    x = batches(run)[0].to(device)
    with torch.no_grad():
        out += [loss_of(average.eval(), x).item(), model.blocks[0].linear.weight.max().item()]
        out += [F.linear(torch.ones(3, 5).to(device), model.blocks[0].linear.weight[:2, :5]).sum().item()]
        out += [parameter.std().item() for parameter in model.parameters() if parameter.dim() > 1]
        out += [F.linear(average.embedding.weight.detach(), model.blocks[1].linear.weight).sum().item()]
    grads = torch.autograd.grad(loss_of(model, x), list(model.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    out += [sum(parameter.grad.abs().sum().item() for parameter in model.parameters())]
    model.double()
    out += [loss_of(model, x).item()]
    model.float().cpu()
    return [*out, loss_of(model, x.cpu()).item(), *model.embedding.weight[3].tolist()]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's rows of parameters, gradients and the optimizer's states."""
    found = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    found += [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return [tensor.to_local() for tensor in found if hasattr(tensor, "to_local")]


def on_other_device(world: int, work: Callable[[duoka.Run], Any]) -> list[Any]:
    def begin(run: duoka.Run) -> Any:
        library = other_device.install()
        found = work(run)
        del library
        return found

    return on_ranks(world, begin, cpu_offload=True)


def test_numbers_on_one_kind_of_device() -> None:
    expected = numbers(None, "cpu")
    for found in on_ranks(2, lambda run: numbers(run, "cpu"), cpu_offload=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@needs_other_device
def test_numbers_on_another_device() -> None:
    found = on_other_device(3, lambda run: numbers(run, "other"))
    assert found[1:] == found[:1] * 2
    assert found[0] == pytest.approx(numbers(None, "cpu"), rel=1e-4, abs=1e-4)


def sharded(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "_block")]


@needs_other_device
def test_parts_stay_on_the_host_and_are_restored_into_models_without_values(tmp_path: Path) -> None:
    def save(run: duoka.Run) -> Any:
        _, model, optimizer, _ = trained(run, "other")
        rows = held(model, optimizer)
        computing = {block.blocks.view.computes_on.type for block in {p._block for p in sharded(model)}}
        devices = {tensor.device.type for tensor in rows}, computing, next(model.parameters()).device.type
        assert (*devices, len(rows)) == ({"cpu"}, {"other"}, "other", 4 * 14)
        saved = run.checkpoint(tmp_path, model=model, optimizer=optimizer)
        saved.save()
        saved.wait()
        return loss_of(model, batches(run)[0].to("other")).item()

    def restore(run: duoka.Run) -> Any:
        with torch.device("meta"):
            model = Net()
            model.scale = torch.ones(1)
        run.model(model, strategy="fsdp")
        model.to("other")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run.checkpoint(tmp_path, model=model, optimizer=optimizer).restore()
        loss = loss_of(model, batches(run)[0].to("other"))
        with run.no_sync(model):
            loss.backward()
        loss_of(model, batches(run)[0].to("other")).backward()
        optimizer.step()
        return loss.item(), {tensor.device.type for tensor in held(model, optimizer)}

    expected = on_other_device(2, save)[0]
    assert on_other_device(3, restore) == [(pytest.approx(expected, abs=1e-5), {"cpu"})] * 3
