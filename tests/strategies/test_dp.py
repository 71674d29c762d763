"""One process on several devices: CPU devices are scattered to, computed on and gathered from like any other."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import duoka
from duoka.view.tensor.batch import BatchTensor
from tests.run.ranks import on_ranks

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


def beside(make: Callable[[], nn.Module], *args: Any, devices: int = 3, **how: Any) -> tuple[Any, Any, nn.Module]:
    """Output and gradients of a model on one device, and of one that computes on several; and that one."""

    def work(run: duoka.Run, model: nn.Module) -> Any:
        out = model(*args)
        loss = sum(
            leaf.double().square().sum() for leaf in torch.utils._pytree.tree_leaves(out) if leaf.requires_grad
        )
        loss.backward()
        return [out, [p.grad for p in model.parameters()], list(model.buffers()), torch.rand(1)]

    found = []
    for options in ({}, {"strategy": "dp", "devices": devices, **how}):
        with duoka.start(seed=0) as run:
            model = run.model(make(), **options)
            found.append(work(run, model))
    return found[0], found[1], model


def assert_alike(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


SEEN: list[tuple[int, ...]] = []  # the shapes of own rows, of each share of what the last `Watched` was given


class Watched(nn.Module):
    """Tells how many rows each device has."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Tensor) -> Any:
        if isinstance(args[0], BatchTensor):
            SEEN[:] = [tuple(share.to_local().shape) for share in args[0]._shares]
        return self.body(*args)


def test_each_device_has_its_rows() -> None:
    one, other, _ = beside(lambda: Watched(nn.Linear(4, 2)), X)
    assert_alike(one, other)
    assert SEEN == [(2, 4), (2, 4), (3, 4)]


def test_the_same_module_call_after_call() -> None:
    """Later calls replay what rules did, with other parameters and other rows."""

    def steps(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(X + step).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    found = []
    for options in ({}, {"strategy": "dp", "devices": 2}):
        with duoka.start(seed=0) as run:
            body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))
            model = run.model(body, **options)
            found.append((steps(model), model.state_dict()))
    assert_alike(*found)


def test_it_is_the_same_object_with_the_same_names() -> None:
    with duoka.start(seed=0) as run:
        model = nn.Sequential(nn.Linear(4, 2))
        parameters = list(model.parameters())
        assert run.model(model, strategy="dp", devices=2) is model
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == ["0.weight", "0.bias"]
        expected = model(X)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_alike(again(X), expected)
            nn.init.zeros_(again[0].weight)
            assert not torch.equal(again(X), expected)
        assert_alike(run.model(model)(X), expected)  # one device again
        assert "forward" not in vars(model)


@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 5), (2, 4)], ids=str)
def test_batch_norm_has_the_statistics_of_all_rows(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    rows = torch.randn(shape).requires_grad_()
    grads = []

    def make() -> nn.Module:
        rows.grad = None
        return nn.Sequential(copy.deepcopy(norm), nn.Tanh())

    one, other, _ = beside(make, rows, devices=2)
    assert_alike(one, other)
    assert one[2][2].item() == other[2][2].item() == 1  # batches tracked
    grads.append(rows.grad)


def test_batch_norm_of_each_share_where_that_is_asked_for() -> None:
    with duoka.start(seed=0, batch_norm="local") as run:
        model = run.model(nn.BatchNorm1d(4), strategy="dp", devices=2)
        out = model(X[:6])
        assert_alike(out[:3], F.batch_norm(X[:3], None, None, model.weight, model.bias, training=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 8), nn.Dropout(0.5)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda: Steps(),
    ],
    ids=["dropout", "attention", "checkpointed"],
)
def test_draws_are_one_devices(make: Callable[[], nn.Module]) -> None:
    one, other, _ = beside(make, torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(1)))
    assert_alike(one, other)


class Steps(nn.Module):
    """Activations that are computed anew, with all that has to be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Flatten(), nn.BatchNorm1d(24))
        self.body = self.normed

    def normed(self, x: Tensor) -> Tensor:
        return self.part(x).tanh()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_recurrent_layers_and_samples_in_another_dimension() -> None:
    make = lambda: Watched(nn.LSTM(4, 5, num_layers=2, dropout=0.3))  # noqa: E731
    one, other, _ = beside(make, torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)), dim=1)
    assert_alike(one, other)
    assert SEEN == [(3, 2, 4), (3, 2, 4), (3, 3, 4)]


class Flat(nn.Module):
    """Steps and samples in one dimension, the steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.one(x.reshape(-1, 4)))  # type: ignore[no-any-return]


def test_samples_and_steps_in_one_dimension() -> None:
    one, other, _ = beside(
        lambda: Watched(Flat()), torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)), dim=1
    )
    assert_alike(one, other)
    assert SEEN == [(3, 2, 4), (3, 2, 4), (3, 3, 4)]


class Structured(nn.Module):
    """Takes a mask that has nothing to do with samples, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.log = 0, []

    def forward(self, x: Tensor, mask: Tensor, *, twice: bool = False) -> Any:
        self.calls += 1
        self.count += 1
        self.log.append(self.count)
        hidden = self.one(x) @ mask
        return {"hidden": hidden, "parts": [hidden * 2 if twice else hidden, self.one.weight]}


def test_structures_masks_and_what_is_left_in_attributes() -> None:
    x, mask = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.ones(4, 4).tril()
    one, other, model = beside(Structured, x, mask, devices=2)
    assert_alike(one, other)
    assert (model.count, model.log, model.calls.item()) == (1, [1], 1)
    model(x, mask, twice=True)
    assert (model.count, model.log, model.calls.item()) == (2, [1, 2], 2)


class Contrast(nn.Module):
    """Compares samples with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.one(x)
        return F.cross_entropy(codes @ codes.t(), torch.arange(len(x)))


class Sorted(Contrast):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).sort(0).values


def test_a_model_whose_rows_mix_and_what_is_computed_whole_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    one, other, _ = beside(Contrast, X)
    assert_alike(one, other)
    capsys.readouterr()
    one, other, _ = beside(Sorted, X)
    assert_alike(one, other)
    assert "Sorted at test_dp.py" in capsys.readouterr().err


def test_fewer_samples_than_devices() -> None:
    one, other, _ = beside(lambda: nn.Linear(4, 2), X[:2])
    assert_alike(one, other)


def test_without_gradients_and_under_autocast() -> None:
    with duoka.start(seed=0) as run:
        plain, model = nn.Linear(4, 2), nn.Linear(4, 2)
        model.load_state_dict(plain.state_dict())
        run.model(model, strategy="dp", devices=2)
        with torch.no_grad():
            assert not model(X).requires_grad
        with torch.inference_mode():
            assert model(X).is_inference()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(X)
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, plain(X))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(precision: Any) -> None:
    with duoka.start(seed=0) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        other = run.model(copy.deepcopy(model), strategy="dp", devices=2, precision=precision)
        for one in (model, other):
            one(X).square().mean().backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=0.05, atol=0.02)


def test_the_loss_next_to_the_model() -> None:
    y = torch.arange(7) % 2

    def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
        if isinstance(scores, BatchTensor):
            SEEN[:] = [tuple(share.to_local().shape) for share in scores._shares]
        return F.cross_entropy(scores, targets, reduction="none")

    found = []
    for options in ({}, {"strategy": "dp", "devices": 3}):
        with duoka.start(seed=0) as run:
            model = run.model(nn.Linear(4, 2), **options)
            losses = run.loss(model, cross_entropy)(X, y)
            losses.mean().backward()
            found.append((losses, [p.grad for p in model.parameters()]))
            rows = list(SEEN)
            with pytest.raises(duoka.OptionError, match="reduction='none'"):
                run.loss(model, F.cross_entropy)(X, y)
    assert_alike(*found)
    assert rows == [(2, 2), (2, 2), (3, 2)]


def test_the_loss_next_to_the_model_on_ranks() -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Linear(4, 1))
        losses = run.loss(model, lambda scores, y: (scores.squeeze(1) - y).square())
        (x, y) = next(iter(run.loader((X, torch.arange(7.0)), batch_size=7)))
        loss = losses(x, y).mean()
        loss.backward()
        return [loss.item(), *torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()]

    expected = on_ranks(1, work)[0]
    for found in on_ranks(2, work):
        assert found == pytest.approx(expected, rel=1e-4)


# --- what a model may do at a later call, or beside its output


class Odd(nn.Module):
    """May do at a later call what it did not in its first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)  # a bias would have a gradient of noise
        self.then: Callable[[Odd, Tensor], Any] = lambda model, x: model.norm(x)

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.one(x))


def keeping(model: Odd, x: Tensor) -> Tensor:
    model.kept = x.mean()
    model.seen = getattr(model, "seen", 0) + len(x)
    return x * model.kept * model.seen


LATER: dict[str, Callable[[Odd, Tensor], Any]] = {
    "without the norm": lambda model, x: x,
    "by the number of rows": lambda model, x: model.norm(x) if len(x) == 7 else x,
    "by a value": lambda model, x: model.norm(x) if x.sum() > 0 else x * 2,
    "draws": lambda model, x: x + torch.rand(len(x), 1),
    "numpy's and python's draws": lambda model, x: x + random.random() * np.random.rand(),
    "kept and counted": keeping,
    "another number of outputs": lambda model, x: (x, x),
    "reentrant": lambda model, x: checkpoint(model.norm, x, use_reentrant=True),
    "mean of all": lambda model, x: x - x.mean(0),
    "loss": lambda model, x: x.square().mean(),
    "number": lambda model, x: (x, x.sum().item()),
}


@pytest.mark.parametrize("then", LATER.values(), ids=LATER)
def test_a_later_call_does_something_else(then: Any) -> None:
    found = []
    for options in ({}, {"strategy": "dp", "devices": 3}):
        with duoka.start(seed=0) as run:
            random.seed(0)
            np.random.seed(0)
            model = run.model(Odd(), **options)
            first = [model(X) for _ in range(2)]
            model.then = then
            out = [model(X + step) for step in range(2)]
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves((first, out)) if isinstance(leaf, Tensor)]
            sum(leaf.double().sin().sum() for leaf in leaves).backward()  # type: ignore[union-attr]
            model.then = lambda model, x: model.norm(x)
            last = model(X)
            grads = [p.grad for p in model.parameters()]
            found.append([first, out, last, grads, list(model.buffers()), torch.rand(1), random.random()])
    assert_alike(*found)


def test_an_error_of_the_model_is_the_script_s_and_on_it_goes() -> None:
    def raising(model: Odd, x: Tensor) -> Tensor:
        raise ValueError(f"nothing in {len(x)} rows")

    with duoka.start(seed=0) as run:
        model = run.model(Odd(), strategy="dp", devices=3)
        model(X)
        model.then = raising
        with pytest.raises(ValueError, match="nothing in 7 rows"):
            model(X)
        model.then = lambda model, x: model.norm(x)
        assert model(X).shape == X.shape


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"strategy": "pd", "devices": 2}, "strategy must be one of"),
        ({"strategy": "dp"}, "devices='cpu:2'"),
        ({"strategy": "dp", "devices": 0}, "at least 1"),
        ({"strategy": "dp", "devices": True}, "at least 1"),
        ({"strategy": "dp", "devices": "gpu:2"}, "--devices|devices"),
        ({"strategy": "dp", "devices": [0, 1]}, "is not there"),
        ({"strategy": "dp", "devices": ["cpu", "meta"]}, "of one kind"),
        ({"strategy": "dp", "device_ids": ["cpu", "nowhere"]}, "devices must be"),
        ({"strategy": "dp", "devices": 2, "output_device": 3}, "is not there"),
        ({"strategy": "dp", "devices": 2, "output_device": "meta"}, "output_device must be one of"),
        ({"strategy": "dp", "devices": 2, "dim": -1}, "dim must be"),
        ({"strategy": "dp", "devices": 2, "compile": True}, "compile must be left out"),
        ({"strategy": "ddp", "devices": 2}, "given with strategy='dp' only"),
        ({"device_ids": [0]}, "strategy='dp' takes several"),
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_what_is_refused(how: dict[str, Any], text: str) -> None:
    with duoka.start(seed=0) as run, pytest.raises(duoka.AskedError, match=text):
        run.model(nn.Linear(2, 1), **how)


def test_it_is_for_one_process() -> None:
    def work(run: duoka.Run) -> None:
        with pytest.raises(duoka.OptionError, match="in a run of one process"):
            run.model(nn.Linear(2, 1), strategy="dp", devices=2)
        with pytest.raises(duoka.OptionError, match="auto or ddp for 2 ranks"):
            run.model(nn.Linear(2, 1), strategy="single")

    on_ranks(2, work)
