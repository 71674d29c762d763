"""Every strategy gives the numbers of one device, for all that a training loop does with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import duoka
from duoka.errors import Refused
from duoka.planning.plan import STRATEGIES as NAMES
from tests.run.ranks import each_on_ranks, on_ranks

STRATEGIES = {"single": (1,), "ddp": (2, 3), "exact": (1, 2), "fsdp": (3,)}
REFUSED = {"fsdp": {"second_order_optimizer": "LBFGS"}}  # which makes one vector of all parameters
DATA = torch.Generator().manual_seed(3)
X, Y = torch.randn(23, 6, generator=DATA), torch.randint(0, 4, (23,), generator=DATA)

Program = Callable[[duoka.Run], Any]
PROGRAMS: dict[str, Program] = {}


def program(one: Program) -> Program:
    PROGRAMS[one.__name__] = one
    return one


def batches(run: duoka.Run) -> Any:
    return run.loader((X, Y), batch_size=9, shuffle=True)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def listed(tensor: Tensor) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()


def weights(*models: nn.Module) -> list[Any]:
    return [listed(value) for model in models for value in model.state_dict().values()]


def gradients(*models: nn.Module) -> list[Any]:
    return [p.grad is not None and listed(p.grad) for model in models for p in model.parameters()]


@program
def an_ordinary_loop(run: duoka.Run) -> Any:
    model = run.model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches(run):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


@program
def accumulated_by_hand(run: duoka.Run) -> Any:
    model = run.model(net())
    for x, y in batches(run):
        (F.cross_entropy(model(x), y, reduction="sum") / 23).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.item(), gradients(model)


@program
def held_gradients(run: duoka.Run) -> Any:
    model = run.model(net())
    for number, (x, y) in enumerate(batches(run)):
        if number < 2:
            with run.no_sync(model):
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
    return gradients(model)


@program
def unused_frozen_and_tied_parameters(run: duoka.Run) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.spare = nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.three.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.two(self.one(x).relu()))

    model = run.model(Net())
    found = []
    for x, y in batches(run):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found.append(gradients(model))
        model.three.requires_grad_(True)  # thawed
    return found


@program
def two_models_in_turn(run: duoka.Run) -> Any:
    generator, critic = (
        run.model(nn.Linear(3, 6)),
        run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))),
    )
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for x, _ in batches(run):
        noise = run.batch(torch.randn(len(x), 3))
        fake = generator(noise)
        of_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
    return weights(generator, critic)


@program
def parameters_in_a_list_of_the_script(run: duoka.Run) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(4))]

        def parameters(self, recurse: bool = True) -> Any:
            return self.made

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.made[0] + self.made[1]

    model = run.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(run):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return gradients(model), [listed(parameter) for parameter in model.parameters()]


class Recomputed(torch.autograd.Function):
    """Computes a module again in the backward pass, as diffusion models do, and solvers by the adjoint method."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
        ctx.module, ctx.parameters = module, parameters[1:]
        ctx.save_for_backward(x, *parameters[:1])
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, first = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        return None, *torch.autograd.grad(out, [x, first, *ctx.parameters], gradient, allow_unused=True)


@program
def recomputed_by_a_function_that_is_given_the_parameters(run: duoka.Run) -> Any:
    first, second = (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
    )
    model = run.model(nn.Sequential(first, second))
    found = []
    for x, y in batches(run):
        model.zero_grad()
        hidden = Recomputed.apply(first, x, *first.parameters())
        out = Recomputed.apply(second, hidden, *second.parameters())
        F.cross_entropy(out + model(x), y).backward()
        found.append(gradients(model))
    return found


@program
def a_penalty_on_slopes_through_batch_norm(run: duoka.Run) -> Any:
    model = run.model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8)))
    slopes = []
    for x, _ in batches(run):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        penalty.backward()
        slopes.append(penalty.item())
    return slopes, gradients(model)


@program
def gradient_penalty(run: duoka.Run) -> Any:
    model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    for x, _ in batches(run):
        x = x.requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1).square().mean() + score.mean()).backward()
    return gradients(model)


@program
def gradients_asked_for(run: duoka.Run) -> Any:
    model = run.model(nn.Linear(6, 4))
    x, y = next(iter(batches(run)))
    return [g.tolist() for g in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))]


@program
def hooks_on_parameters(run: duoka.Run) -> Any:
    model = run.model(nn.Linear(6, 4))
    seen: list[Any] = []
    model.weight.register_hook(lambda grad: (seen.append(grad.tolist()), grad.clamp(-0.01, 0.01))[1])
    x, y = next(iter(batches(run)))
    F.cross_entropy(model(x), y).backward()
    return seen, model.weight.grad.tolist()


@program
def hooks_on_modules(run: duoka.Run) -> Any:
    model = run.model(net())
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append((len(out), out.mean().item())))
    for x, y in batches(run):
        F.cross_entropy(model(x), y).backward()
    return seen, gradients(model)


@program
def mixed_precision(run: duoka.Run) -> Any:
    model = run.model(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in batches(run):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [round(value, 2) for value in leaves(weights(model))]


@program
def checkpointed_activations(run: duoka.Run) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5)), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    model = run.model(Net())
    x, y = next(iter(batches(run)))
    F.cross_entropy(model(x), y).backward()
    return gradients(model)


@program
def batch_norm_and_buffers(run: duoka.Run) -> Any:
    model = run.model(nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(run):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return weights(model)


@program
def a_loss_that_has_parameters(run: duoka.Run) -> Any:
    class Centers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.randn(4, 6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x - self.centers[y]).square().sum(1).mean()

    model, criterion = run.model(nn.Linear(6, 6)), run.model(Centers())
    x, y = next(iter(batches(run)))
    loss = criterion(model(x), y)
    loss.backward()
    return loss.item(), gradients(model, criterion)


@program
def second_order_optimizer(run: duoka.Run) -> Any:
    model = run.model(nn.Linear(6, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = next(iter(batches(run)))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure).item(), weights(model)


def exactly(work: Program, shares: int = 4) -> Program:
    """A program in a run of strategy exact, which is asked for with a first model."""

    def in_shares(run: duoka.Run) -> Any:
        state = torch.get_rng_state()
        run.model(nn.Linear(1, 1), strategy="exact", shares=shares)
        torch.set_rng_state(state)
        return work(run)

    return in_shares


def sharding(work: Program) -> Program:
    """A program whose models are all sharded."""

    def in_shards(run: duoka.Run) -> Any:
        run.model = partial(run.model, strategy="fsdp")  # type: ignore[method-assign]
        return work(run)

    return in_shards


def on_devices(strategy: str, devices: int) -> dict[str, list[Any]]:
    """Run all programs on each rank, one for each device; return the results."""
    if strategy == "exact":
        return each_on_ranks(devices, {name: exactly(work) for name, work in PROGRAMS.items()})
    if strategy == "fsdp":
        return each_on_ranks(devices, {name: sharding(work) for name, work in PROGRAMS.items()})
    return each_on_ranks(devices, PROGRAMS)


@cache
def on_one_device() -> dict[str, list[Any]]:
    return each_on_ranks(1, PROGRAMS)


def leaves(found: Any) -> list[float]:
    return torch.utils._pytree.tree_leaves(found)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        pytest.param(name, many, marks=[pytest.mark.long] if many == 3 and 2 in counts else [])
        for name, counts in STRATEGIES.items()
        for many in counts
        if name != "single"
    ],
)
def test_it_is_as_on_one_device(strategy: str, devices: int) -> None:
    refused = REFUSED.get(strategy, {})
    for name, ranks in on_devices(strategy, devices).items():
        expected = leaves(on_one_device()[name])
        for found in ranks:
            if name in refused:
                assert isinstance(found, Refused), name
                assert refused[name] in str(found)
            else:
                assert leaves(found) == pytest.approx(expected, rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(("compress", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_that_travel_in_16_bits(compress: str, dtype: torch.dtype) -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Linear(1, 1, bias=False))
        for _ in range(2):  # an unknown backward pass, and one that is expected
            model.zero_grad()
            model(torch.full((1, 1), 1.001)).sum().backward()
        return model.weight.grad.item()

    assert on_ranks(2, work, compress=compress) == [((torch.tensor(1.001) / 2).to(dtype) * 2).item()] * 2


def test_every_strategy_is_tested() -> None:
    assert set(STRATEGIES) == set(NAMES) - {"auto", "hsdp"}  # hsdp: test_fsdp.py, tests/flows/test_machines.py
