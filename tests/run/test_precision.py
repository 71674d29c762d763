"""`run.model(precision="bf16")`: autocast within the model, and the numbers of one device that does the same."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from tests.run.ranks import on_ranks

DATA = torch.Generator().manual_seed(3)
X, Y = torch.randn(23, 32, generator=DATA), torch.randint(0, 4, (23,), generator=DATA)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def by_hand() -> tuple[list[float], nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows in torch.arange(23).split(8):
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(X[rows])
        loss = F.cross_entropy(scores.float(), Y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def train(run: duoka.Run) -> Any:
    model = run.model(net(), precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in run.loader((X, Y), batch_size=8):
        scores = model(x)
        assert scores.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return losses, [p.tolist() for p in model.parameters()]


def test_on_one_device_it_is_autocast_to_the_bit() -> None:
    losses, model = by_hand()
    assert on_ranks(1, train) == [(losses, [p.tolist() for p in model.parameters()])]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_and_are_near_one_device(ranks: int) -> None:
    losses, _ = by_hand()
    found = on_ranks(ranks, train)
    assert all(one == found[0] for one in found)
    assert found[0][0] == pytest.approx(losses, rel=1e-2)


@pytest.mark.parametrize("who", ["run.model", "the script"])
def test_16_bits_do_not_keep_a_model_from_being_shared_out(who: str) -> None:
    def work(run: duoka.Run) -> dict[Any, int]:
        model = run.model(nn.Linear(32, 4), precision="bf16" if who == "run.model" else "32")
        for (x,) in run.loader((X,), batch_size=8):
            with nullcontext() if who == "run.model" else torch.autocast("cpu", torch.bfloat16):
                model(x).sum().backward()
        return dict(run._session.view.whole_operations)

    assert on_ranks(2, work) == [{}, {}]


class Odd(nn.Module):
    """Calls itself, may fail, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32, 4)

    def forward(self, x: Tensor, depth: int = 1) -> Any:
        if depth == 0:
            assert torch.is_autocast_enabled("cpu")
            return {"scores": self.one(x), "count": 3}
        inner = self(x, depth - 1)
        assert torch.is_autocast_enabled("cpu")
        if x.sum() == 0:
            raise ValueError("nothing in it")
        return inner


def test_structures_errors_and_models_that_call_themselves() -> None:
    with duoka.start(seed=0) as run:
        model = run.model(Odd(), precision="bf16")
        with pytest.raises(ValueError, match="nothing in it"):
            model(torch.zeros(2, 32))
        assert not torch.is_autocast_enabled("cpu")
        found = model(X)
        assert (found["scores"].dtype, found["count"]) == (torch.float32, 3)
        assert not torch.is_autocast_enabled("cpu")


def test_copies_compute_alike_and_names_stay() -> None:
    with duoka.start(seed=0) as run:
        model = run.model(net(), precision="bf16").eval()
        expected = model(X)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), expected)
            nn.init.zeros_(other[3].weight)
            assert not torch.equal(other(X), expected)  # it is its own
        assert model.state_dict().keys() == net().state_dict().keys()
        again = run.model(model, precision="32")
        assert torch.equal(again(X), net().eval()(X))


class Scores(nn.Module):
    """Not a module of torch's own: Dynamo of torch 2.10 skips the files of those."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.end(x)
        return scores


def test_compiled() -> None:
    with duoka.start(seed=0) as run:
        model = run.model(Scores(), precision="bf16")
        expected = model(X)
        graphs = []
        model.compile(backend=lambda graph, _: (graphs.append(graph), graph)[1])
        assert torch.equal(model(X), expected)
        assert not torch.is_autocast_enabled("cpu")
        assert len(graphs) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_had_is_said(ranks: int) -> None:
    options: list[dict[str, Any]] = [
        {"precision": "bf61"},
        {"bucket_cap_mb": 3},
        {"process_group": None},
        {"device_ids": [0]},
        {"speed": 3},
    ]

    def work(run: duoka.Run) -> list[str]:
        said = []
        for how in options:
            with pytest.raises(duoka.OptionError) as error:
                run.model(net(), **how)
            said.append(str(error.value))
        return said

    for said in on_ranks(ranks, work):
        assert "one of 32, bf16, fp16, but is 'bf61'; did you mean bf16?" in said[0]
        for text, how in zip(said, options, strict=True):
            assert next(iter(how)) in text
        assert "buckets of 25 MB" in said[1]
