"""What scripts do with sharded parameters, beside computing their model, gives the results of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from tests.run.ranks import each_on_ranks
from tests.strategies.test_conformance import gradients, leaves, weights
from tests.strategies.test_fsdp import LABELS, ROWS


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 4))


USES: dict[str, Callable[[duoka.Run, nn.Sequential], Any]] = {}


def use(one: Callable[[duoka.Run, nn.Sequential], Any]) -> Callable[[duoka.Run, nn.Sequential], Any]:
    USES[one.__name__] = one
    return one


def losses(run: duoka.Run, model: nn.Module) -> Any:
    for x, y in run.loader((ROWS, LABELS), 9):
        yield F.cross_entropy(model(x), y)


@use
def a_gradient_that_is_a_batch(run: duoka.Run, model: nn.Sequential) -> Any:
    for loss in losses(run, model):
        loss.backward()
    model[0].weight.grad = run.batch(torch.arange(96.0).view(6, 16)).t() * 2  # as libraries for privacy do
    return gradients(model)


@use
def penalties_on_weights(run: duoka.Run, model: nn.Sequential) -> Any:
    found = []
    for loss in losses(run, model):
        squares = sum(p.square().sum() for p in model.parameters())
        sizes = sum(p.abs().sum() for p in model.parameters())
        loss = 0.1 * squares + loss
        loss += 0.01 * sizes
        loss.backward()
        found.append(loss.item())
    (0.1 * sum(p.norm() for p in model.parameters())).backward()
    return found, gradients(model)


@use
def numbers_of_gradients(run: duoka.Run, model: nn.Sequential) -> Any:
    for loss in losses(run, model):
        loss.backward()
    norms = [p.grad.norm() for p in model.parameters()]
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    read = [float(norms[0]), f"{norms[1]:.3f}" == f"{norms[1].item():.3f}", bool(norms[2] > norms[3])]
    return [norm.item() for norm in norms], whole.item(), read, gradients(model), model[0].weight.tolist()


@use
def a_loop_s_own_optimizer(run: duoka.Run, model: nn.Sequential) -> Any:
    average = [p.detach().clone() for p in model.parameters()]
    for loss in losses(run, model):
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for one, p in zip(average, model.parameters(), strict=True):
                p -= 0.1 * p.grad
                one.lerp_(p, 0.1)
    return weights(model), [one.tolist() for one in average]


@use
def new_values(run: duoka.Run, model: nn.Sequential) -> Any:
    model.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)
    nn.init.trunc_normal_(model[0].weight)
    nn.init.xavier_normal_(model[2].weight)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
            p.mul_(torch.rand_like(p))
    return weights(model), torch.rand(1).item()


@use
def passes_through_the_model(run: duoka.Run, model: nn.Sequential) -> Any:
    x, y = next(iter(run.loader((ROWS, LABELS), 9)))
    with torch.inference_mode():
        first = model(x).sum().item()
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y).backward()
    model.eval()
    with torch.inference_mode():
        seen = model(x).sum().item(), first
    left = model(x).sum().item()  # and no backward pass
    with torch.no_grad():
        plain = model(ROWS).sum().item()
    return slope.tolist(), seen, left, plain, gradients(model)


@use
def parameters_that_thaw(run: duoka.Run, model: nn.Sequential) -> Any:
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number, loss in enumerate(losses(run, model)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model[0].requires_grad_(number > 0)
    return weights(model)


@use
def outputs_that_are_written_into(run: duoka.Run, model: nn.Sequential) -> Any:
    """Of a Linear on three dimensions they are views."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x += 1
                x = x.tanh()
            return self.layers[0](x)

    warnings.simplefilter("error")
    writing = run.model(InPlace(), strategy="auto" if run.world_size == 1 else "fsdp")
    for x, _ in run.loader((ROWS, LABELS), 9):
        out = writing(x[:, None].expand(-1, 3, -1))
        out *= 2
        out.square().mean().backward()
    return gradients(writing)


def test_it_is_as_on_one_device() -> None:
    def uses(**how: Any) -> dict[str, Callable[[duoka.Run], Any]]:
        return {name: lambda run, one=one: one(run, run.model(net(), **how)) for name, one in USES.items()}

    alone = each_on_ranks(1, uses())
    for count in (2, 3):
        for name, ranks in each_on_ranks(count, uses(strategy="fsdp")).items():
            for found in ranks:
                assert leaves(found) == pytest.approx(leaves(alone[name]), rel=1e-4, abs=1e-6), name
