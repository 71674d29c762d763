from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from duoka.view.learning import Learning, Mixed, Place, Unclear
from tests.view.modules import (
    Net,
    Run,
    check,
    normal,
    plainly,
    scalar,
    watched,
)

__all__ = ["watched"]


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)


# --- learning leaves no trace


STATES: dict[str, tuple[Callable[[], dict[str, Any]], Run]] = {
    "a buffer": (lambda: {"count": torch.zeros(())}, lambda m, x: m.count.add_(x.shape[0])),
    "a codebook": (lambda: {"mean": torch.zeros(6)}, lambda m, x: m.mean.lerp_(x.detach().mean((0, 1)), 0.1)),
    "a buffer put anew": (
        lambda: {"mean": torch.zeros(6)},
        lambda m, x: setattr(m, "mean", m.mean * 0.9 + x.detach().mean((0, 1))),
    ),
    "a counter": (lambda: {"calls": 0}, lambda m, x: setattr(m, "calls", m.calls + 1)),
    "a number of rows": (lambda: {"rows": 0}, lambda m, x: setattr(m, "rows", m.rows + x.shape[0])),
    "a number": (lambda: {"last": 0.0}, lambda m, x: setattr(m, "last", x.sum().item())),
    "a count of entries": (lambda: {"hits": 0}, lambda m, x: setattr(m, "hits", int((x > 0).sum()))),
    "a tensor": (lambda: {"aux": None}, lambda m, x: setattr(m, "aux", x.pow(2).mean())),
    "rows": (lambda: {"hidden": None}, lambda m, x: setattr(m, "hidden", x * 2)),
    "a list": (lambda: {"kept": []}, lambda m, x: m.kept.append(x.mean())),
    "a list of the model's own": (lambda: {"_kept": []}, lambda m, x: m._kept.append(x.mean())),
    "a list of numbers": (lambda: {"sizes": []}, lambda m, x: m.sizes.append(x.shape[0])),
    "a list of places": (lambda: {"kept": [0.0]}, lambda m, x: m.kept.__setitem__(0, x.mean())),
    "a list of places for rows": (
        lambda: {"kept": [torch.zeros(())]},
        lambda m, x: m.kept.__setitem__(0, x.mean()),
    ),
    "a dict": (lambda: {"kept": {}}, lambda m, x: m.kept.update(aux=x.mean())),
    "a dict with a place": (lambda: {"kept": {"aux": None}}, lambda m, x: m.kept.update(aux=x.mean())),
    "a dict of numbers": (lambda: {"kept": {"n": 0}}, lambda m, x: m.kept.update(n=m.kept["n"] + 1)),
    "an object": (lambda: {"kept": SimpleNamespace(aux=None)}, lambda m, x: setattr(m.kept, "aux", x.mean())),
    "lists in a dict": (lambda: {"kept": {"aux": []}}, lambda m, x: m.kept["aux"].append(x.mean())),
}


class Stateful(Net):
    def __init__(self, state: dict[str, Any], change: Run) -> None:
        super().__init__(lambda m, x: x)
        for name, value in state.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.names, self.change = tuple(state), change

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        self.change(self, out)
        return out

    def state(self) -> list[Any]:
        found = [getattr(self, name) for name in self.names]
        return [vars(value) if isinstance(value, SimpleNamespace) else value for value in found]


@pytest.mark.parametrize(("state", "change"), STATES.values(), ids=STATES)
def test_what_a_forward_pass_leaves_behind_is_one_device_s(state: Callable[[], Any], change: Run) -> None:
    def run(model: Any, x: Tensor) -> Any:
        states = []
        for step in range(3):
            out = model(x * (step + 1))
            states.append(tree_map(lambda leaf: leaf, model.state()))
        scalar(out).backward()
        return out, states

    check(lambda: Stateful(state(), change), run, [normal(6, 4, 6)])


def test_names_that_come_into_being_in_a_forward_pass() -> None:
    def change(m: Any, x: Tensor) -> None:
        m.calls = getattr(m, "calls", 0) + 1

    def run(model: Any, x: Tensor) -> Any:
        return plainly(model, x), model.calls

    assert check(lambda: Stateful({}, change), run, [normal(6, 4, 6)]) == [[3], [3]]


class _Drawing(Net):
    """Rows do not change by what is drawn; the source goes on, once for each call."""

    def __init__(self, source: Any, draw: Run) -> None:
        super().__init__(lambda m, x: x)
        self.source, self.draw = source, draw

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + self.draw(self.source))


SOURCES: dict[str, tuple[Callable[[], Any], Run]] = {
    "torch": (lambda: None, lambda _: torch.rand(()).item()),
    "random": (lambda: None, lambda _: random.random()),
    "numpy": (lambda: None, lambda _: float(np.random.rand())),
    "a torch.Generator": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand((), generator=g)),
    "a random.Random": (lambda: random.Random(1), lambda g: g.random()),
    "a numpy Generator": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "a numpy RandomState": (lambda: np.random.RandomState(1), lambda g: float(g.rand())),
    "an iterator": (lambda: iter(range(1, 99)), lambda g: float(next(g))),
}


@pytest.mark.parametrize(("make", "draw"), SOURCES.values(), ids=SOURCES)
def test_learning_draws_from_nobody_s_source(make: Callable[[], Any], draw: Run) -> None:
    def run(model: Any, x: Tensor) -> Any:
        out = [model(x) for _ in range(3)]
        scalar(out).backward()
        return out

    random.seed(5)
    np.random.seed(5)
    check(lambda: _Drawing(make(), draw), run, [normal(6, 4, 6)])


# --- what is told


def _learn(run: Run, rows: int = 6) -> Any:
    whole = normal(rows, 4, 5)
    learning = Learning(nn.Linear(2, 2))
    return learning.learn(lambda start, stop: run(learning.given(whole[start:stop])), rows)


@pytest.mark.parametrize(
    ("run", "places"),
    [
        (lambda x: x, [Place(0)]),
        (lambda x: x.transpose(0, 1), [Place(1)]),
        (lambda x: x.permute(2, 1, 0), [Place(2)]),
        (lambda x: (x, {"a": x[:, 0], "b": [x.transpose(0, 1)]}), [Place(0), Place(0), Place(1)]),
        (lambda x: (x, None, "text", 2), [Place(0), None, None, None]),
        (lambda x: x.reshape(-1, 5), [Place(0)]),
        (lambda x: x.transpose(0, 1).reshape(-1, 5), [Place(0, outer=True)]),
    ],
)
def test_where_the_batch_is_in_each_output(run: Run, places: list[Any]) -> None:
    assert list(_learn(run).outputs) == places


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.mean(),
        lambda x: x - x.mean(0),
        lambda x: x.cumsum(0),
        lambda x: x - x[-1:],
        lambda x: x - x[:1],
        lambda x: (x, x.shape[0]),
        lambda x: (x, float(x.sum())),
        lambda x: x[:3],
        lambda x: x @ x.flatten(1).T[:5, :3],
        lambda x: 1 / 0,
        lambda x: [x] * x.shape[0],
    ],
)
def test_rows_that_mix_are_noticed(run: Run) -> None:
    with pytest.raises(Mixed):
        _learn(run)


@pytest.mark.parametrize(
    "run",
    [lambda x: x * 0, lambda x: x * 0 + 3, lambda x: (x * 0, None), lambda x: x > 99, lambda x: torch.zeros(3, 4)],
)
def test_equal_rows_tell_nothing(run: Run) -> None:
    with pytest.raises(Unclear):
        _learn(run)


def test_where_the_batch_is_in_each_draw() -> None:
    def run(x: Tensor) -> Tensor:
        step = nn.functional.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)
        noise = torch.rand(x.shape[0], 1, 1) + torch.rand(4, 5)
        return step + noise

    places = _learn(run).draws[""]
    assert [place and place.dim for place in places] == [1, 0, None]
    assert places[0].order == (1, 0, 2)


def test_learning_a_module_puts_it_back_when_it_raises() -> None:
    model = nn.BatchNorm1d(5)
    model.calls = 0  # type: ignore[assignment]

    def run(start: int, stop: int) -> Any:
        model.calls += 1  # type: ignore[operator]
        model.running_mean.add_(1)  # type: ignore[operator, union-attr]
        torch.rand(3)
        raise ValueError

    before = torch.get_rng_state()
    with pytest.raises(Mixed):
        Learning(model).learn(run, 4)
    assert model.calls == 0
    assert model.running_mean.tolist() == [0] * 5  # type: ignore[operator, union-attr]
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_batch_norm_is_set_aside() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    whole = normal(6, 5)
    learned = Learning(model).learn(lambda start, stop: model(whole[start:stop]), 6)
    assert learned.outputs == (Place(0),)
    assert model[1].num_batches_tracked == 0
