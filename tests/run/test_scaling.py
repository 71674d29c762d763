"""`precision="fp16"`: the scaler is within the model, and what is outside sees true gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import duoka
from duoka.run.scaling import FIRST, STEPS_TO_GROW
from tests.run.ranks import on_ranks

DATA = torch.Generator().manual_seed(3)
X, Y = torch.randn(24, 8, generator=DATA), torch.randint(0, 4, (24,), generator=DATA)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def by_hand() -> tuple[list[float], list[Any]]:
    """The loop that everybody writes with GradScaler."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for rows in torch.arange(24).split(8):
        with torch.autocast("cpu", torch.float16):
            scores = model(X[rows])
        loss = F.cross_entropy(scores.float(), Y[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


def train(run: duoka.Run) -> Any:
    """The same, as if there were no float16."""
    model = run.model(net(), precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in run.loader((X, Y), batch_size=8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        duoka.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return losses, [p.tolist() for p in model.parameters()]


def test_it_is_what_a_grad_scaler_in_the_loop_gives() -> None:
    losses, weights = on_ranks(1, train)[0]
    expected, those = by_hand()
    assert losses == pytest.approx(expected, rel=1e-3)
    for one, other in zip(weights, those, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree(ranks: int) -> None:
    found = on_ranks(ranks, train)
    assert all(one == found[0] for one in found)
    assert found[0][0] == pytest.approx(by_hand()[0], rel=1e-2)


def test_gradients_that_are_too_small_for_float16_arrive() -> None:
    def work(run: duoka.Run, precision: Any) -> float:
        model = run.model(nn.Linear(8, 1, bias=False), precision=precision)
        (x,) = next(iter(run.loader((X,), batch_size=24)))
        (model(x).sum() * 1e-9).backward()
        return model.weight.grad.norm().item()

    expected = on_ranks(1, lambda run: work(run, "32"))[0]
    for ranks in (1, 2):
        assert on_ranks(ranks, lambda run: work(run, "fp16")) == [pytest.approx(expected, rel=1e-2)] * ranks


def test_what_is_outside_of_the_model_is_not_scaled() -> None:
    """A penalty on the weights, inputs that want a gradient, a second model, a gradient of a gradient."""

    def work(run: duoka.Run, precision: Any) -> Any:
        torch.manual_seed(1)
        first = run.model(nn.Linear(8, 6), precision=precision)
        second = run.model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), precision=precision)
        third = run.model(nn.Linear(1, 1))
        x = X.clone().requires_grad_()
        codes = first(x)
        (slope,) = torch.autograd.grad(second(codes).sum(), codes, create_graph=True)
        penalty = sum(p.square().sum() for p in second.parameters())
        (third(second(codes)).square().mean() + slope.square().mean() + 0.1 * penalty).backward()
        grads = [p.grad for model in (first, second, third) for p in model.parameters()]
        return [x.grad, slope.detach(), *grads]

    expected, found = (on_ranks(1, lambda run, one=one: work(run, one))[0] for one in ("32", "fp16"))
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=2e-3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.one(x.view(len(x), 2, 4))[0][:, -1])  # type: ignore[no-any-return]


class Repeated(nn.Module):
    """Computes activations anew, calls itself, and has its weights in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.other = self.one

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        if again:
            return self(x, again=False)  # type: ignore[no-any-return]
        hidden = checkpoint(lambda x: self.one(x).relu(), x, use_reentrant=False)
        return self.out(self.other(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Recurrent, Repeated])
def test_models_of_other_kinds(make: Callable[[], nn.Module]) -> None:
    def work(run: duoka.Run, precision: Any) -> Any:
        torch.manual_seed(1)
        model = run.model(make(), precision=precision)
        parameters = list(model.parameters())
        F.cross_entropy(model(X), Y).backward()
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        return [p.grad for p in parameters]

    expected, found = (on_ranks(1, lambda run, one=one: work(run, one))[0] for one in ("32", "fp16"))
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=2e-3)


# --- steps that are left out


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_that_one_rank_overflows_is_left_out_by_all(ranks: int) -> None:
    def work(run: duoka.Run) -> Any:
        torch.manual_seed(1)
        model = run.model(nn.Linear(8, 1), precision="fp16")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        weights, scales = [], []
        for step in range(4):
            x = X[:6].clone()
            x[0] *= 60000.0 if step in (1, 2) else 1.0  # rank 0 has this row
            (x,) = next(iter(run.loader((x,), batch_size=6)))
            optimizer.zero_grad()
            (model(x).square().mean() * 0.1).backward()
            optimizer.step()
            weights.append(model.weight.tolist())
            scales.append(run._scale.value)
        steps = {int(state["step"]) for state in optimizer.state.values()}
        return weights, scales, steps, model.weight.grad.isfinite().all().item()

    found = on_ranks(ranks, work)
    assert all(one == found[0] for one in found)
    weights, scales, steps, _ = found[0]
    assert weights[0] == weights[1] == weights[2] != weights[3]
    assert scales == [FIRST, FIRST / 2, FIRST / 4, FIRST / 4]
    assert steps == {2}


def test_gradients_stay_where_they_are_and_other_optimizers_are_left_alone() -> None:
    with duoka.start(seed=0) as run:
        model, other = run.model(nn.Linear(2, 1), precision="fp16"), nn.Linear(2, 1)
        model(torch.full((1, 2), 3e38)).sum().backward()
        other.weight.grad = torch.full((1, 2), float("inf"))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert not model.weight.grad.isfinite().all()
        assert model.weight.isfinite().all()
        assert not other.weight.isfinite().any()
    model(torch.ones(1, 2)).sum().backward()  # after the run, too
    model.weight.grad.fill_(float("inf"))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not model.weight.isfinite().any()  # nobody looks any more


def test_the_scale_grows_is_saved_and_tells_of_steps_in_vain(capsys: pytest.CaptureFixture[str]) -> None:
    with duoka.start(seed=0) as run:
        run.model(nn.Linear(2, 1), precision="fp16")
        scale = run._scale
        assert scale is not None
        for _ in range(STEPS_TO_GROW + 1):
            scale._update(True)
        assert (scale.value, scale.state_dict()) == (2 * FIRST, {"value": 2 * FIRST, "good": 1})
        scale._update(False)
        state = scale.state_dict()
        for _ in range(60):
            scale._update(False)
        assert capsys.readouterr().err.count("is the loss itself nan or inf?") == 1
        scale.load_state_dict(state)
        assert scale.value == FIRST


def test_copies_belong_to_the_same_run() -> None:
    with duoka.start(seed=0) as run:
        model = run.model(net(), precision="fp16")
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(X * 60000).sum().backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in other.parameters())
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(X), model(X))


# --- what is refused

OWN = torch.ones(8, requires_grad=True)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x * OWN)  # type: ignore[no-any-return]


class Reentrant(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.one, x, use_reentrant=True)  # type: ignore[no-any-return]


def test_gradients_that_would_be_wrong_are_refused() -> None:
    with duoka.start(seed=0) as run:
        with pytest.raises(duoka.Refused, match=r"of shape \(8,\).* neither a parameter nor an input"):
            run.model(Foreign(), precision="fp16")(X)
        with pytest.raises(duoka.Refused, match="use_reentrant=False"):
            run.model(Reentrant(), precision="fp16")(X.clone().requires_grad_())
        model = run.model(net(), precision="fp16")
        model(X).sum().backward()
        with pytest.raises(duoka.Refused, match="computes gradients itself"):
            torch.optim.LBFGS(model.parameters()).step(lambda: model(X).sum())
        with pytest.raises(duoka.OptionError, match="bf16 compiles"):
            run.model(net(), precision="fp16", compile=True)


def test_the_scale_is_in_the_runs_checkpoint(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> float:
        model = run.model(net(), precision="fp16")
        saved = run.checkpoint(tmp_path, model=model)
        saved.restore()
        scale = run._scale
        assert scale is not None
        found = scale.value
        scale._update(False)
        saved.save()
        saved.wait()
        return found

    assert on_ranks(2, work) == [FIRST, FIRST]
    assert on_ranks(1, work) == [FIRST / 2]
