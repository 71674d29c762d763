from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from duoka.errors import Refused
from duoka.view.batch import BatchTensor
from duoka.view.view import View
from tests.view.modules import Part, again, boundary, look, on_one_device, on_this_rank, seen, watched
from tests.view.ranks import in_turns, shared, whole_of

__all__ = ["watched"]

Run = Callable[..., Any]
Pair = namedtuple("Pair", "hidden scores")  # noqa: PYI024


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)


class Net(Part):
    """A layer, and what comes then."""

    def __init__(self, then: Run) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.then = then

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        look(x)
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
    with again():
        scalar(out).backward()
    return out


def same(expected: Any, found: Any) -> None:
    one, other = tree_leaves(expected), tree_leaves(found)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor):
            assert a.shape == b.shape
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-4)
        elif isinstance(a, (int, str, type(None))):
            assert a == b


def check(
    build: Callable[[], nn.Module], run: Run, data: Any, world_size: int = 2, rows: tuple[int, ...] = (0,)
) -> list[list[Any]]:
    """The run gives on each rank what it gives on one device; returns what `look` saw there.

    rows: which of `data` are batches; the others are plain.
    """
    expected, grads, states = on_one_device(build, run, data)

    def on_rank(view: View) -> list[Any]:
        batch = [shared(view, value) if index in rows else value for index, value in enumerate(data)]
        found, found_grads, found_states = on_this_rank(view, build, run, batch)
        same(expected, torch.utils._pytree.tree_map(whole_of, found))
        same(grads, found_grads)
        assert found_states == states, "random numbers"
        return list(seen())

    return in_turns(world_size, on_rank)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def local(n: int, world_size: int) -> list[list[Any]]:
    return [[n * (rank + 1) // world_size - n * rank // world_size] for rank in range(world_size)]


CUT: dict[str, Run] = {  # rows are independent: computed where they are
    "tensor": lambda m, x: x,
    "dict": lambda m, x: {"a": x * 2, "b": [x, x.sum(-1)]},
    "tuple": lambda m, x: (x, x.mean((1, 2))),
    "named tuple": lambda m, x: Pair(x, x.sum(1)),
    "beside others": lambda m, x: (x, None, 3, "text", 1.5),
    "sequence first": lambda m, x: (x.transpose(0, 1), x),
    "batch last": lambda m, x: x.permute(2, 1, 0),
    "side by side": lambda m, x: x.reshape(-1, 6),
    "strided": lambda m, x: x.transpose(0, 1).reshape(-1, 6),
    "numbers": lambda m, x: (x.argmax(-1), x > 0, x),
    "normalised": lambda m, x: x.softmax(-1) + nn.functional.layer_norm(x, (6,)),
    "along the sequence": lambda m, x: x.cumsum(1) + x.flip(1),
    "attention": lambda m, x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
}
OPENED: dict[str, Run] = {  # rows mix, or are summed up: every rank would give something else
    "loss": lambda m, x: x.pow(2).mean(),
    "scores and loss": lambda m, x: (x, x.exp().mean()),
    "scores and number": lambda m, x: (x, x.sum().item()),
    "numbers of all": lambda m, x: (x, int((x > 0).sum())),
    "attention over the batch": lambda m, x: nn.functional.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3),
    "causal along the batch": lambda m, x: x.cumsum(0),
    "the one before": lambda m, x: x - x.roll(1, 0),
    "the first of all": lambda m, x: x - x[:1],
    "the last of all": lambda m, x: x - x[-1:],
    "mean of all": lambda m, x: x - x.mean(0),
    "sorted": lambda m, x: x.sort(0).values,
    "batch-hard": lambda m, x: torch.cdist(x.flatten(1), x.flatten(1)).max(1).values,
    "standardised over the batch": lambda m, x: (x - x.mean(0)) / (x.std(0) + 1),
    "by its size": lambda m, x: x / x.shape[0],
    "positions in the batch": lambda m, x: x + torch.arange(x.shape[0]).view(-1, 1, 1),
}


@pytest.mark.parametrize("then", CUT.values(), ids=CUT)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3)])
def test_independent_rows_stay_where_they_are(then: Run, n: int, world_size: int) -> None:
    assert check(lambda: Net(then), plainly, [normal(n, 4, 6)], world_size) == local(n, world_size)


@pytest.mark.parametrize("then", OPENED.values(), ids=OPENED)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3)])
def test_what_is_not_each_row_s_own_is_opened(then: Run, n: int, world_size: int) -> None:
    assert check(lambda: Net(then), plainly, [normal(n, 4, 6)], world_size) == [["batch"]] * world_size


class Nested(Part):
    """Gives its loss; what it is made of is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net(CUT["tensor"])
        self.mixing = Net(OPENED["causal along the batch"])

    def forward(self, x: Tensor) -> Tensor:
        look(x)
        return (self.inner(x) * self.mixing(x)).mean()


def test_children_of_an_opened_module_are_cut() -> None:
    assert check(Nested, plainly, [normal(6, 4, 6)]) == [["batch", 3, "batch"]] * 2


class Recurrent(Part):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        look(x.transpose(0, 1))
        return self.cell(x, state)


def test_sequence_first_states_are_carried() -> None:
    def run(model: Any, x: Tensor) -> Any:
        out, state = model(x)
        again, state = model(x, tuple(part.detach() for part in state))
        scalar((out, again)).backward()
        return again, state

    x = normal(4, 6, 6)  # batch-first data, turned around by the script

    def turned(model: Any, x: Tensor) -> Any:
        return run(model, x.transpose(0, 1))

    assert check(Recurrent, turned, [x]) == [[2, 2], [2, 2]]


# --- plain inputs


def test_masks_of_the_batch_are_cut_and_others_are_not() -> None:
    def then(m: Any, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        look(mask)
        look(table)
        return x * mask[:, None, None] + table

    found = check(lambda: Net(then), plainly, [normal(8, 4, 6), normal(8), normal(4, 6)])
    assert found == [[4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_size_equal_by_chance_is_not_the_batch(world_size: int) -> None:
    def then(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        look(positions)
        return x + positions[:, None]  # one for each step

    found = check(lambda: Net(then), plainly, [normal(6, 6, 6), normal(6)], world_size)
    assert found == [[share, 6] for (share,) in local(6, world_size)]


def test_a_square_mask_of_the_batch_s_size_is_asked_again_with_another_batch() -> None:
    def then(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        look(mask)
        return mask @ x  # steps by steps

    def run(model: Any, x: Tensor, other: Tensor, mask: Tensor) -> Any:
        first, second, third = model(x, mask), model(other, mask), model(x, mask)
        scalar((first, second, third)).backward()
        return first, second, third

    data = [normal(4, 4, 6), normal(6, 4, 6), normal(4, 4).tril()]
    assert check(lambda: Net(then), run, data, rows=(0, 1)) == [[4, 4, 3, 4, 2, 4]] * 2


def test_what_was_learned_holds_for_batches_of_other_sizes() -> None:
    def run(model: Any, *batches: Tensor) -> Any:
        out = [model(x) for x in batches]
        scalar(out).backward()
        return out

    data = [normal(n, 4, 6) for n in (8, 5, 3, 2, 1)]
    found = check(lambda: Net(CUT["tensor"]), run, data, rows=(0, 1, 2, 3))
    assert found == [[4, 2, 1, 1, 1], [4, 3, 2, 1, 1]]


def test_a_batch_smaller_than_the_ranks_stays_whole() -> None:
    assert check(lambda: Net(CUT["tensor"]), plainly, [normal(2, 4, 6)], 3, rows=()) == [[2]] * 3


def test_a_batch_cut_by_hand() -> None:
    def run(model: Any, x: Tensor) -> Any:
        return plainly(model, x[2:8] * 2)

    assert check(lambda: Net(CUT["tensor"]), run, [normal(9, 4, 6)], rows=()) == [[3], [3]]


def test_a_sequence_first_batch_cut_by_hand() -> None:
    def run(model: Any, x: Tensor) -> Any:
        out, _ = model(x)
        scalar(out).backward()
        return out

    assert check(Recurrent, run, [normal(5, 8, 6)], rows=()) == [[4], [4]]


def test_a_plain_batch_and_one_of_a_loader_are_learned_apart() -> None:
    def run(model: Any, x: Tensor, y: Tensor) -> Any:
        out = [model(x), model(y)]
        scalar(out).backward()
        return out

    assert check(lambda: Net(CUT["tensor"]), run, [normal(6, 4, 6), normal(8, 4, 6)]) == [[3, 4], [3, 4]]


def test_noise_that_has_one_row_and_later_one_for_each_sample() -> None:
    def run(model: Any, x: Tensor, one: Tensor, each: Tensor) -> Any:
        out = [model(x, one), model(x, each)]
        scalar(out).backward()
        return out

    check(lambda: Net(lambda m, x, noise: x + noise), run, [normal(6, 4, 6), normal(1, 4, 6), normal(6, 4, 6) * 2])


def test_two_batches_of_different_sizes() -> None:
    def then(m: Any, x: Tensor, other: Tensor) -> Tensor:
        return x + other.mean(0)

    check(lambda: Net(then), plainly, [normal(6, 4, 6), normal(9, 4, 6)], rows=(0, 1))


# --- when to ask again


def test_training_and_evaluation_are_learned_apart() -> None:
    def then(m: Any, x: Tensor) -> Any:
        return x.mean() if m.training else x

    def run(model: Any, x: Tensor) -> Any:
        loss = model(x)
        scores = model.eval()(x)
        again = model.train()(x)
        scalar((loss, scores, again)).backward()
        return loss, scores, again

    assert check(lambda: Net(then), run, [normal(6, 4, 6)]) == [["batch", 3, "batch"]] * 2


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_rows_that_are_all_alike_tell_nothing_and_are_asked_again(start: float) -> None:
    """A last layer that begins at zero must not hide that rows mix, nor keep a model whole for ever."""

    def build(mixes: bool) -> nn.Module:
        def then(m: Any, x: Tensor) -> Tensor:
            out = x * m.gate + start
            return out - out.mean(0) if mixes else out

        model = Net(then)
        model.gate = nn.Parameter(torch.zeros(()))
        return model

    def run(model: Any, x: Tensor) -> Any:
        first = plainly(model, x)
        with torch.no_grad():
            model.gate.add_(1)
        return first, plainly(model, x), plainly(model, x)

    x = normal(6, 4, 6)
    assert check(lambda: build(False), run, [x]) == [[6, 3, 3]] * 2
    assert check(lambda: build(True), run, [x])[0][1:] == ["batch", "batch"]


class Lazy(Part):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        look(x)
        return self.first(x)


def test_lazy_modules_are_made_by_a_whole_batch() -> None:
    def run(model: Any, x: Tensor) -> Any:
        return plainly(model, x), plainly(model, x)

    assert check(Lazy, run, [normal(6, 4, 6)]) == [[6, 3]] * 2


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
            states.append(torch.utils._pytree.tree_map(lambda leaf: leaf, model.state()))
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


# --- hooks, objects, errors


def test_hooks_of_the_script_see_the_whole_batch() -> None:
    def run(model: Any, x: Tensor) -> Any:
        sums: list[float] = []
        model(x)
        model.first.register_forward_hook(lambda module, args, out: sums.append(out.sum().item()))
        model.first.register_full_backward_hook(lambda module, ins, outs: sums.append(outs[0].sum().item()))
        here = boundary()
        if here is not None:
            here.forget()
        return plainly(model, x), sums

    assert check(lambda: Net(CUT["tensor"]), run, [normal(6, 4, 6)]) == [[3, "batch"]] * 2


class Cache:
    """A key-value cache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


def test_an_object_that_may_keep_tensors_is_computed_whole_and_once() -> None:
    def then(m: Any, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(x)
        return torch.stack(cache.keys).sum(0)

    def run(model: Any, x: Tensor) -> Any:
        cache = Cache()
        out = [model(x, cache), model(x * 2, cache)]
        scalar(out).backward()
        return out, cache.keys

    assert check(lambda: Net(then), run, [normal(6, 4, 6)]) == [[6, 6]] * 2


class Slots:
    """An output that no pytree knows."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Ordinary:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@pytest.mark.parametrize("kind", [Slots, Ordinary])
def test_an_object_that_comes_out_holds_the_whole_batch(kind: Any) -> None:
    def run(model: Any, x: Tensor) -> Any:
        out = model(x).hidden
        scalar(out).backward()
        return out

    check(lambda: Net(lambda m, x: kind(x)), run, [normal(6, 4, 6)])


def test_an_error_of_the_model_is_the_script_s() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        raise ValueError(f"a batch of {x.shape[0]}")

    def run(model: Any, x: Tensor) -> Any:
        with pytest.raises(ValueError, match="a batch of 6"):
            model(x)
        return 0

    check(lambda: Net(then), run, [normal(6, 4, 6)])


def test_another_number_of_outputs_than_learned_is_refused() -> None:
    def then(m: Any, x: Tensor) -> Any:
        return (x, x) if m.more else (x,)

    def on_rank(view: View) -> None:
        model = Net(then)
        model.more = False

        def run(model: Any, x: Tensor) -> Any:
            model(x)
            model.more = True
            with pytest.raises(Refused, match="gave 2 outputs, but 1 in its first call"):
                model(x)

        on_this_rank(view, lambda: model, run, [shared(view, normal(6, 4, 6))])

    in_turns(2, on_rank)


def test_a_module_without_parameters_is_no_boundary() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            look(x)
            return x.mean()

    def run(model: Any, x: Tensor) -> Any:
        return Plain()(x)

    assert check(lambda: Net(CUT["tensor"]), run, [normal(6, 4, 6)]) == [["batch"]] * 2


def test_rows_come_out_as_batches_in_the_place_they_have() -> None:
    def run(model: Any, x: Tensor) -> Any:
        out = model(x)
        if isinstance(x, BatchTensor):
            assert isinstance(out, BatchTensor)
            assert (out._spec.dim, out._spec.outer, out._spec.inner) == (0, 4, 1)
        return out

    check(lambda: Net(CUT["strided"]), run, [normal(6, 4, 6)])


# --- activations that are computed again


class Checkpointed(Part):
    """Layers with dropout whose activations are computed again in the backward pass."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.how, self.reentrant = how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        look(x)
        for layer in self.layers:
            inner = layer if self.how == "modules" else self._inline(layer)
            x = checkpoint(inner, x, use_reentrant=self.reentrant)
        return x

    def _inline(self, layer: Any) -> Any:
        return lambda x: nn.functional.dropout(layer[0](x).tanh(), 0.5, self.training)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["modules", "functions"])
def test_activations_computed_again_have_the_same_masks(how: str, reentrant: bool) -> None:
    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        out = [plainly(model, x) for _ in range(2)]
        return out, x.grad

    assert check(lambda: Checkpointed(how, reentrant), run, [normal(6, 4, 6)]) == [[3] * 3] * 2
