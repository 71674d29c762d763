"""Compiled modules. Dynamo's eager backend compiles nothing, but guards and breaks graphs as any does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from duoka.view.modules.calls import ModuleCalls
from duoka.view.modules.compiled import is_compiled
from duoka.view.view import View
from tests.rounding import assert_same, moved
from tests.view.nets import HERE, normal, scalar, watched
from tests.view.ranks import in_turns, shared, whole_of

__all__ = ["watched"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports


@pytest.fixture(autouse=True)
def _fresh(watched: None) -> Iterator[None]:
    torch.manual_seed(7)
    torch._dynamo.reset()
    with FakeTensorMode():
        pass  # CUDA builds of torch 2.10 crash, without a GPU, once the thread that entered the first one has ended
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(6, 6), then

    def forward(self, x: Tensor) -> Any:
        self.given = x
        return self.then(self, self.first(x))


def compiled_calls(
    then: Callable[..., Any], batches: list[Tensor], before: Callable[..., Any] = lambda *_: None
) -> list[bool]:
    """See that each call of a compiled module gives one device's numbers; tell which calls ran compiled code.

    before: called with the module, how many calls came before, and the batch.
    """
    torch.manual_seed(3)
    start, draws = Net(then), torch.get_rng_state()

    def alone(model: Net, batches: list[Tensor]) -> Any:
        outs = []
        torch.set_rng_state(draws)
        for at, x in enumerate(batches):
            before(model, at, x)
            outs.append(model(x))
            scalar(outs[-1]).backward()
        return outs, [p.grad for p in model.parameters()], torch.rand(2)

    expected = alone(copy.deepcopy(start), batches)
    torch.set_rng_state(draws)

    def on_rank(view: View) -> Any:
        inner, outs = copy.deepcopy(start), []
        model: Any = torch.compile(inner, backend=calling)
        HERE.calls, HERE.seen = ModuleCalls(view), []
        compiled: list[int] = []
        for at, x in enumerate(batches):
            batch = shared(view, x)
            before(inner, at, batch)
            RUN.clear()
            out = model(batch)
            compiled.append(len(RUN))
            scalar(out).backward()
            outs.append(whole_of(out))
        grads = [view.ranks.all_reduce(p.grad) / 2 for p in inner.parameters()]
        return (outs, grads, torch.rand(2)), [bool(count) for count in compiled]

    ranks = in_turns(2, on_rank)
    for found, _ in ranks:
        assert_same(expected, found, lambda seed: alone(*moved((start, batches), seed)))
    return ranks[1][1]


RUN: list[int] = []  # of each graph that ran


def calling(graph: Any, inputs: Any) -> Any:
    def run(*args: Any) -> Any:
        RUN.append(1)
        return graph(*args)

    return run


def several(count: int) -> list[Tensor]:
    return [normal(6, 6) + at for at in range(count)]


INDEPENDENT: dict[str, Callable[..., Any]] = {
    "pointwise": lambda m, x: x.tanh() * 2,
    "BatchNorm in evaluation": lambda m, x: nn.functional.batch_norm(x, torch.zeros(6), torch.full((6,), 2.0)),
}


@pytest.mark.parametrize("then", INDEPENDENT.values(), ids=INDEPENDENT)
def test_a_module_whose_rows_are_independent_runs_compiled(then: Callable[..., Any]) -> None:
    found = compiled_calls(then, several(4))
    assert found[0] is False  # the proof
    assert found[-1] is True


MIXING: dict[str, Callable[..., Any]] = {
    "mean of all": lambda m, x: x - x.mean(0),
    "dropout": lambda m, x: nn.functional.dropout(x, 0.5),
    "sorted": lambda m, x: x.sort(0).values,
    "loss": lambda m, x: x.square().mean(),
    "the first row": lambda m, x: x - x.unbind(0)[0],
}


@pytest.mark.parametrize("then", MIXING.values(), ids=MIXING)
def test_what_concerns_other_rows_runs_uncompiled(then: Callable[..., Any]) -> None:
    assert not any(compiled_calls(then, several(3)))


def test_rows_that_were_gathered_before_count_too() -> None:
    """All rows are there already when the module asks for one, so no rank meets another."""
    found = compiled_calls(lambda m, x: x - m.given.unbind(0)[0], several(3), lambda module, at, x: x.unbind(0))
    assert not any(found)


def test_a_flag_that_is_set_later_is_proven_anew() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        return x - x.mean(0) if m.training and m.centre else x * 2

    def before(module: Any, at: int, x: Tensor) -> None:
        module.centre = at > 3

    found = compiled_calls(then, several(7), before)
    assert found[3] is True
    assert not any(found[5:])  # the call before compiled anew, so what came of it was dropped


def mixes_late(m: Any, x: Tensor) -> Tensor:
    return x - x.mean(0) if m.centre else x * 2


def late(module: Any, at: int, x: Tensor) -> None:
    module.centre = at > 4


@torch.compiler.disable
def uncompiled(m: Any, x: Tensor) -> Tensor:
    return mixes_late(m, x)


def test_what_dynamo_does_not_compile_is_not_guarded() -> None:
    assert not any(compiled_calls(uncompiled, several(8), late)[2:])


def test_a_module_that_dynamo_compiles_no_more_runs_uncompiled() -> None:
    def no_more(module: Any, at: int, x: Tensor) -> None:
        late(module, at, x)
        torch.compiler.set_stance("force_eager" if at > 2 else "default")

    found = compiled_calls(mixes_late, several(8), no_more)
    assert found[2] is True
    assert not any(found[3:])


def test_at_the_limit_of_recompilations_numbers_are_one_device_s() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        return mixes_late(m, x) * m.scale

    def before(module: Any, at: int, x: Tensor) -> None:
        module.centre, module.scale = at > 5, 1 + at // 2

    with torch._dynamo.config.patch(recompile_limit=2):
        compiled_calls(then, [normal(6, 6) for _ in range(7)], before)


def test_modes_and_sizes_are_kinds_of_their_own() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, m.training) * x.shape[0]

    def before(module: Any, at: int, x: Tensor) -> None:
        module.train(at < 2)

    batches = [*several(4), normal(4, 6), normal(4, 6)]
    compiled_calls(then, batches, before)


def test_a_module_that_keeps_a_batch_runs_uncompiled() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        m.kept = x * 2
        return m.kept + 1

    assert not any(compiled_calls(then, several(3)))


def test_an_error_of_some_rows_is_every_rank_s() -> None:
    table = torch.randn(6, 2)

    def on_rank(view: View) -> list[Any]:
        compiled = torch.compile(nn.Embedding.from_pretrained(table), backend="eager")
        calls, found = ModuleCalls(view), []
        for ids in (torch.arange(4), torch.arange(4), torch.tensor([0, 1, 2, 9]), torch.arange(4)):
            try:
                found.append(whole_of(calls.call(nn.Module.__call__, compiled, (shared(view, ids),), {})))
            except IndexError as error:
                found.append(str(error))
        return found

    for found in in_turns(2, on_rank):
        assert found.pop(2) == "index out of range in self"
        torch.testing.assert_close(found, [table[:4]] * 3)


def test_compiled_modules_are_recognised() -> None:
    assert not is_compiled(nn.Linear(2, 2))
    assert is_compiled(torch.compile(nn.Linear(2, 2)))
    in_place = nn.Linear(2, 2)
    in_place.compile()
    assert is_compiled(in_place)
