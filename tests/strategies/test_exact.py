"""The strategy by itself, and through the API, where bits are compared between 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from duoka.collectives.base import OneRank
from duoka.errors import OptionError
from duoka.strategies.exact import Exact
from tests.run.ranks import each_on_ranks, on_ranks
from tests.strategies.test_conformance import PROGRAMS, exactly

COMPARED = ("an_ordinary_loop", "accumulated_by_hand", "held_gradients", "gradient_penalty", "batch_norm_and_buffers")


def test_the_same_bits_on_any_number_of_ranks() -> None:
    programs = {name: exactly(PROGRAMS[name]) for name in COMPARED}
    alone = each_on_ranks(1, programs)
    for name, ranks in each_on_ranks(4, programs).items():
        assert ranks == alone[name] * 4, name


def test_the_same_bits_whoever_computes_a_share() -> None:
    """Also on a number of ranks that is no power of two, and where some rank has one share and others several."""
    programs = {name: exactly(PROGRAMS[name]) for name in PROGRAMS}
    alone = each_on_ranks(1, programs)
    for rows in ((3, 1), (1, 2, 1), (1, 1, 1)):
        for name, ranks in each_on_ranks(len(rows), programs, rows=rows).items():
            for found in ranks:
                assert repr(found) == repr(alone[name][0]), (rows, name)


def test_every_way_to_a_gradient() -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Linear(3, 1, bias=False))
        x = run.batch(torch.arange(15.0).view(5, 3))
        by_hand = nn.Parameter(torch.ones(3))
        spare = nn.Parameter(torch.ones(2))
        loss = model(x).sum() + (x @ by_hand).sum() + (model.weight**2).sum()
        given = [model.weight, by_hand]
        asked = torch.autograd.grad(loss, given, retain_graph=True)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, [spare], retain_graph=True)
        assert torch.autograd.grad(loss, [spare], retain_graph=True, allow_unused=True) == (None,)
        loss.backward(inputs=[by_hand], retain_graph=True)
        assert model.weight.grad is None
        loss.backward()
        loss = model(x).sum()
        loss.backward()
        return [one.tolist() for one in (*asked, model.weight.grad, by_hand.grad)], model.weight.tolist()

    x = torch.arange(15.0).view(5, 3).sum(0)
    for found, weight in on_ranks(2, exactly(work)):
        penalty = 2 * torch.tensor(weight)
        expected = [x + penalty[0], x, 2 * x + penalty[0], 2 * x]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one).view(3), other)


def test_a_parameter_in_the_shape_of_a_batch() -> None:
    """As in every distribution of torch, whose parameters are broadcast together."""

    def gradients(x: Tensor) -> Tensor:
        scale = nn.Parameter(torch.tensor([0.5]))
        spread, row = torch.broadcast_tensors(scale.exp(), x.sum(1))
        loss = (row * spread + scale.expand_as(row) * 3).sum()
        loss = loss + (scale.repeat(6).view_as(row) * row).sum() + sum(torch.atleast_2d(scale, x)[0]).sum()
        (torch.distributions.Normal(x, scale.exp()).log_prob(x * 2).sum() + loss).backward()
        assert scale.grad is not None
        return scale.grad

    x = torch.arange(18.0).view(6, 3)
    for found in on_ranks(2, exactly(lambda run: gradients(run.batch(x)).tolist())):
        torch.testing.assert_close(torch.tensor(found), gradients(x))


def test_new_memory_and_new_parameters() -> None:
    """`parameter.data = ...`, a layer that is thawed, one that is added."""

    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
        x = run.batch(torch.arange(15.0).view(5, 3))
        model[0].requires_grad_(False)
        model(x).sum().backward()
        assert model[0].weight.grad is None
        model[0].requires_grad_(True)
        model[1].weight.data = torch.ones(1, 3)
        model.append(nn.Linear(1, 1))
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()], [p.tolist() for p in model.parameters()]

    found, values = on_ranks(2, exactly(work))[0]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = torch.tensor(value)
    model(torch.arange(15.0).view(5, 3)).sum().backward()
    for parameter, grad in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(torch.tensor(grad), parameter.grad)


def test_a_function_of_the_script_s_own_is_computed_whole() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grads[0] * w, (grads[0] * x).sum(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(x, self.weight)  # type: ignore[no-any-return]

    def work(run: duoka.Run) -> Any:
        model = run.model(Net())
        model(run.batch(torch.arange(15.0).view(5, 3))).sum().backward()
        return model.weight.grad.tolist()

    for ranks in (1, 2):
        assert on_ranks(ranks, exactly(work)) == [[30.0, 35.0, 40.0]] * ranks


def test_models_that_are_not_alike_for_all_samples() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.calls = nn.Linear(3, 1), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                print("three")
            self.seen.add_(1)
            return self.last(x)  # type: ignore[no-any-return]

    def work(run: duoka.Run) -> Any:
        model = run.model(Net())
        for _ in range(5):
            model(run.batch(torch.randn(9, 3)))
        return model.calls, model.seen.item()

    assert on_ranks(1, exactly(work)) == [(5, 5.0)]
    assert on_ranks(2, exactly(work)) == [(5, 5.0)] * 2


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"strategy": "exakt"}, "did you mean exact"),
        ({"strategy": "exact", "shares": 3}, "a power of two"),
        ({"strategy": "exact", "shares": 1}, "at least the number of devices, 2"),
        ({"shares": 4}, "given with strategy='exact'"),
    ],
)
def test_what_cannot_be_asked_for(how: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        on_ranks(2, lambda run: run.model(nn.Linear(1, 1), **how))


def test_it_is_asked_for_first() -> None:
    def work(run: duoka.Run) -> None:
        run.model(nn.Linear(1, 1))
        run.model(nn.Linear(1, 1), strategy="exact")

    with pytest.raises(OptionError, match="before anything else is made"):
        on_ranks(1, work)


def test_precision() -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh()))
        x = run.batch(torch.arange(66.0).view(11, 6).sin())
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x).float() + model(2 * x).float()
            out.square().mean().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    assert on_ranks(4, exactly(work))[0] == on_ranks(1, exactly(work))[0]


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_draw_are_told(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, exactly(lambda run: len(list(run.loader(Noisy(), 8, num_workers=workers)))))
    assert "draws random numbers, seeded by sample and epoch" in capfd.readouterr().err


def test_not_with_what_depends_on_ranks() -> None:
    for how in ({"batch_norm": "local"}, {"randomness": "worker"}, {"compress": "bf16"}):
        with pytest.raises(OptionError, match="its bits would depend on the devices"):
            on_ranks(1, exactly(lambda run: None), **how)


def test_a_pass_that_fails_leaves_what_it_has_completed() -> None:
    strategy = Exact(OneRank(), (2,))
    leaf, later = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    strategy.adopt(leaf)
    strategy.adopt(later)
    one, other = (strategy.alias(share, leaf) for share in range(2))
    unreached = strategy.alias(0, later) * 2
    unreached.register_hook(lambda grad: 1 / 0)  # type: ignore[arg-type,return-value]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), strategy.backward("here"):
            (unreached + (one + 5 * other)).sum().backward()
    assert leaf.grad.tolist() == [6.0, 6.0]  # twice the mean of 1 and 5
    assert later.grad is None
    with strategy.backward("there"):
        F.relu(other).sum().backward()
    assert leaf.grad.tolist() == [6.5, 6.5]  # the first share did not come to it


def test_a_pass_reaches_a_parameter_in_two_graphs() -> None:
    strategy = Exact(OneRank(), (2,))
    leaf = nn.Parameter(torch.ones(2))
    strategy.adopt(leaf)
    first = [strategy.alias(share, leaf) for share in range(2)]
    with strategy.backward("here"):
        (first[0] + 5 * first[1]).sum().backward()
    assert strategy.alias(0, leaf) is first[0]
    strategy._current.clear()  # as if the script had dropped the parameter
    second = [strategy.alias(share, leaf) for share in range(2)]
    with strategy.backward("here"):
        (first[0] * 3 + first[1] + 5 * second[0] + second[1] + 7 * leaf).sum().backward()
    assert leaf.grad.tolist() == [3.0 + 5 + 7] * 2


def test_a_parameter_that_the_script_drops_is_freed() -> None:
    strategy = Exact(OneRank(), (2,))
    leaf = nn.Parameter(torch.ones(2))
    strategy.adopt(leaf)
    with strategy.backward("here"):
        sum(strategy.alias(share, leaf) for share in range(2)).sum().backward()
    known = ref(leaf)
    del leaf
    with strategy.backward("here"):
        torch.ones(1, requires_grad=True).sum().backward()
    assert known() is None
