"""Module calls of several ranks that are threads: each sees its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from duoka.view.modules.calls import ModuleCalls
from duoka.view.view import View
from tests.rounding import assert_same, moved
from tests.view.ranks import in_turns, shared, whole_of

Run = Callable[..., Any]

HERE = threading.local()  # calls: this thread's; seen: what its outermost module calls did
_call: Any = nn.Module.__call__


class Part(nn.Module):
    """A module of a test."""


def _called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    calls = getattr(HERE, "calls", None)
    if calls is None or torch.compiler.is_compiling():
        return _call(self, *args, **kwargs)
    if not calls._here.outermost:
        return calls.call(_call, self, args, kwargs)
    view = calls.view
    met, whole = view.interactions, view.whole_operations.total()
    try:
        return calls.call(_call, self, args, kwargs)
    finally:
        HERE.seen.append(
            "whole" if view.whole_operations.total() > whole else "exchanged" if view.interactions > met else "apart"
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Module calls go through the `ModuleCalls` of the rank that makes them."""
    monkeypatch.setattr(nn.Module, "__call__", _called)
    yield
    torch.compiler.set_stance("default")  # the process's, which ranks that are threads put back in any order
    HERE.__dict__.clear()


def seen() -> list[str]:
    """What the outermost module calls of this rank did.

    "apart": each rank computed its own rows, and exchanged nothing; "exchanged": the ranks exchanged something, or
    drew random numbers; "whole": something was computed whole.
    """
    return HERE.seen  # type: ignore[no-any-return]


def on_one_device(build: Callable[[], Any], run: Callable[..., Any], data: Any) -> tuple[Any, list[Any], Any]:
    """What `run(model, *data)` gives, the gradients of the model's parameters, and numbers drawn afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    model = build()
    copies = [value.clone() if isinstance(value, Tensor) else value for value in data]
    found = run(model, *copies), gradients(model), drawn()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return found


def on_this_rank(
    view: View, build: Callable[[], Any], run: Callable[..., Any], data: Any
) -> tuple[Any, list[Any], Any]:
    """The same on one of several ranks: gradients are averaged, as a strategy would."""
    model = build()
    HERE.calls, HERE.seen = ModuleCalls(view), []
    try:
        copies = [value.clone() if type(value) is Tensor else value for value in data]
        found = run(model, *copies)
    finally:
        HERE.calls = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = view.ranks.all_reduce(parameter.grad) / view.ranks.world_size
    return found, gradients(model), drawn()


def calls() -> ModuleCalls | None:
    """This rank's; None on one device."""
    return getattr(HERE, "calls", None)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def drawn() -> tuple[float, float, float]:
    """The next number of each of the common sources."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


class Net(Part):
    """A layer, and what comes then."""

    def __init__(self, then: Run) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.then = then

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        return self.then(self, self.first(x), *more, **named)


def scalar(out: Any) -> Tensor:
    """Something to differentiate, that weighs all entries differently."""
    found = torch.zeros(())
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.arange(1.0, leaf.numel() + 1).view(leaf.shape)
            found = found + (leaf * weights / leaf.numel()).sin().sum()
    return found


def plainly(model: Any, *batch: Any, **named: Any) -> Any:
    out = model(*batch, **named)
    scalar(out).backward()
    return out


def check(
    build: Callable[[], nn.Module], run: Run, data: Any, world_size: int = 2, rows: tuple[int, ...] = (0,)
) -> list[list[str]]:
    """The run gives on each rank what it gives on one device; returns what was `seen` there.

    rows: which of `data` are batches; the others are plain.
    """
    *expected, states = on_one_device(build, run, data)

    def nudged(seed: int) -> Any:
        return on_one_device(lambda: moved(build(), seed), run, moved(data, seed))[:2]

    def on_rank(view: View) -> list[str]:
        batch = [shared(view, value) if index in rows else value for index, value in enumerate(data)]
        found, found_grads, found_states = on_this_rank(view, build, run, batch)
        assert_same(expected, [tree_map(whole_of, found), found_grads], nudged)
        assert found_states == states, "random numbers"
        return list(seen())

    return in_turns(world_size, on_rank)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
