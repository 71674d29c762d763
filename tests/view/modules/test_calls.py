from __future__ import annotations

import itertools
import threading
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from duoka.view.modules.calls import ModuleCalls
from duoka.view.modules.recomputing import on_rows
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.nets import HERE, Net, Part, Run, calls, check, normal, on_this_rank, plainly, scalar, watched
from tests.view.ranks import in_turns, on_ranks, shared, whole_of

__all__ = ["watched"]


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)


Pair = namedtuple("Pair", "hidden scores")
APART: dict[str, Run] = {  # rows are independent: no rank has to ask another
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
    "by its size": lambda m, x: x / x.shape[0],
    "positions in the batch": lambda m, x: x + torch.arange(x.shape[0]).view(-1, 1, 1),
}
TOGETHER: dict[str, Run] = {  # rows mix, or are summed up
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
    "rescaled when it has grown": lambda m, x: x / x.abs().max().clamp(min=3),
    "the rows above a bound": lambda m, x: x[x[:, 0, 0] > 0].sum(),
}


@pytest.mark.parametrize("then", APART.values(), ids=APART)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3)])
def test_independent_rows_stay_where_they_are(then: Run, n: int, world_size: int) -> None:
    assert check(lambda: Net(then), plainly, [normal(n, 4, 6)], world_size) == [["apart"]] * world_size


@pytest.mark.parametrize("then", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3)])
def test_what_is_not_each_row_s_own_is_all_rows_(then: Run, n: int, world_size: int) -> None:
    for found in check(lambda: Net(then), plainly, [normal(n, 4, 6)], world_size):
        assert found in (["exchanged"], ["whole"])


# --- what changes between calls


def batches(count: int, scale: float = 1.0) -> list[Tensor]:
    return [normal(6, 4, 6) * (1 + scale * index) for index in range(count)]


def one_after_another(model: Any, *data: Tensor) -> Any:
    return [plainly(model, x) for x in data]


def all_of(data: list[Tensor]) -> tuple[int, ...]:
    return tuple(range(len(data)))


def counting(then: Run) -> Run:
    """`then` is also given how many calls came before."""

    def counted(m: Any, x: Tensor) -> Any:
        m.steps = getattr(m, "steps", -1) + 1
        return then(m, x, m.steps)

    return counted


def fake_quantised(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax().clamp(min=8) / 127
    return x + ((x / scale).round() * scale - x).detach()


CHANGING: dict[str, Run] = {
    "activations grow past a bound": lambda m, x: x / x.abs().max().clamp(min=3),
    "fake quantisation with outliers": lambda m, x: fake_quantised(x),
    "centred after a warm-up": counting(lambda m, x, steps: x - x.mean(0) if steps > 4 else x),
    "another number of outputs": counting(lambda m, x, steps: (x,) * (1 + steps % 3)),
    "a dropout that is raised": counting(lambda m, x, steps: F.dropout(F.dropout(x, 0.1), 0.1 * (steps > 2))),
    "now a batch, now its mean": counting(lambda m, x, steps: x if steps % 2 else x.mean(0)),
    "another layout": counting(lambda m, x, steps: x.transpose(0, steps % 3) * 2),
    "a number that varies": counting(lambda m, x, steps: x * (0.5 + steps)),
    "training switched": counting(lambda m, x, steps: F.dropout(x, 0.4, training=steps % 2 == 0)),
}


@pytest.mark.parametrize("then", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_path_that_comes_later_is_right_at_once(then: Run, world_size: int) -> None:
    data = batches(7, 0.7)
    check(lambda: Net(then), one_after_another, data, world_size, all_of(data))


def test_a_flag_that_the_trainer_sets_is_followed() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        return x - x.mean(0) if getattr(m, "centre", False) else x

    def run(model: Any, *data: Tensor) -> Any:
        before = [plainly(model, x) for x in data[:3]]
        model.centre = True
        return before, [plainly(model, x) for x in data[3:]]

    data = batches(5)
    assert check(lambda: Net(then), run, data, rows=all_of(data)) == [["apart"] * 3 + ["exchanged"] * 2] * 2


def test_sources_beside_the_model_are_asked_as_often_as_on_one_device() -> None:
    def run(model: Any, *data: Tensor) -> Any:
        own, ours, order = (
            np.random.default_rng(3),
            torch.Generator().manual_seed(3),
            itertools.cycle([1.0, 2.0, 5.0]),
        )
        model.then = lambda m, x: x * float(own.random()) + torch.rand((), generator=ours) * next(order)
        return [plainly(model, x) for x in data], float(own.random()), torch.rand((), generator=ours), next(order)

    data = batches(5)
    check(lambda: Net(lambda m, x: x), run, data, rows=all_of(data))


def test_samples_are_counted_in_forward() -> None:
    def run(model: Any, *data: Tensor) -> Any:
        met: Counter[str] = Counter()

        def then(m: Any, x: Tensor) -> Tensor:
            met["samples"] += len(x)
            met["by shape"] += x.shape[0]
            return x

        model.then = then
        return [plainly(model, x) for x in data], dict(met)

    data = batches(4)
    check(lambda: Net(lambda m, x: x), run, data, rows=all_of(data))


# --- modules within modules


class Nested(Part):
    """Gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net(APART["tensor"])
        self.mixing = Net(TOGETHER["causal along the batch"])

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.mixing(x)).mean()


def test_a_model_that_returns_its_loss() -> None:
    check(Nested, plainly, [normal(6, 4, 6)])


class Recurrent(Part):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        return self.cell(x, state)


def test_sequence_first_states_are_carried() -> None:
    def run(model: Any, x: Tensor) -> Any:
        x = x.transpose(0, 1)
        out, state = model(x)
        again, state = model(x, tuple(part.detach() for part in state))
        scalar((out, again)).backward()
        return again, state

    check(Recurrent, run, [normal(4, 6, 6)])


# --- hooks, objects, errors


def test_hooks_of_the_script_see_the_whole_batch() -> None:
    def run(model: Any, x: Tensor) -> Any:
        sums: list[float] = []
        model(x)
        model.first.register_forward_hook(lambda module, args, out: sums.append(out.sum().item()))
        return plainly(model, x), sums

    check(lambda: Net(APART["tensor"]), run, [normal(6, 4, 6)])


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_hooks_on_nodes_of_the_graph_see_the_whole_batch() -> None:
    def run(model: Any, x: Tensor) -> Any:
        seen: list[Any] = []
        model.first.register_backward_hook(lambda module, given, out: seen.append([given[0], out[0]]))
        return plainly(model, x), seen

    for found in check(lambda: Net(APART["side by side"]), run, [normal(6, 4, 6)]):
        assert found == ["whole"]


class Cache:
    """A key-value cache."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


def test_an_object_that_keeps_tensors() -> None:
    def then(m: Any, x: Tensor, cache: Cache) -> Tensor:
        cache.keys.append(x)
        return torch.stack(cache.keys).sum(0)

    def run(model: Any, x: Tensor) -> Any:
        cache = Cache()
        out = [model(x, cache), model(x * 2, cache)]
        scalar(out).backward()
        return out, cache.keys

    assert check(lambda: Net(then), run, [normal(6, 4, 6)]) == [["apart"] * 2] * 2


class Slots:
    """An output that no pytree knows."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor


@pytest.mark.parametrize("kind", [Slots, Frozen])
def test_an_object_that_comes_out_holds_the_batch(kind: Any) -> None:
    def run(model: Any, x: Tensor) -> Any:
        scores, made = model(x)
        scalar((scores, made.hidden)).backward()
        return scores, made.hidden

    assert check(lambda: Net(lambda m, x: (x, kind(x))), run, [normal(6, 4, 6)]) == [["apart"]] * 2


def test_an_object_that_knows_the_batch_s_size_is_the_whole_batch_s() -> None:
    def run(model: Any, x: Tensor) -> Any:
        made = model(x)
        out = made.mean + made.batch_shape[0]
        scalar(out).backward()
        return out

    check(lambda: Net(lambda m, x: torch.distributions.Normal(x, x.exp())), run, [normal(6, 4, 6)])


def test_an_error_of_the_model_is_the_script_s() -> None:
    def then(m: Any, x: Tensor) -> Tensor:
        raise ValueError(f"a batch of {x.shape[0]}")

    def run(model: Any, x: Tensor) -> Any:
        with pytest.raises(ValueError, match="a batch of 6"):
            model(x)
        return 0

    check(lambda: Net(then), run, [normal(6, 4, 6)])


def test_rows_come_out_as_batches_in_the_place_they_have() -> None:
    def run(model: Any, x: Tensor) -> Any:
        out = model(x)
        if isinstance(x, BatchTensor):
            assert isinstance(out, BatchTensor)
            assert (out._spec.dim, out._spec.outer, out._spec.inner) == (0, 4, 1)
        return out

    check(lambda: Net(APART["strided"]), run, [normal(6, 4, 6)])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_gradient_mode(mode: Any) -> None:
    def run(model: Any, x: Tensor) -> Any:
        with mode():
            return [(model(part) * 2).sum().item() for part in (x, x + 1, x + 2)]

    assert check(lambda: Net(APART["tensor"]), run, [normal(6, 4, 6)]) == [["apart"] * 3] * 2


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
        for layer in self.layers:
            inner = layer if self.how == "modules" else self._inline(layer)
            how = {"use_reentrant": self.reentrant}
            known = calls()
            x = checkpoint(inner, x, **how) if known is None else on_rows(known.view, checkpoint, inner, (x,), how)
        return x

    def _inline(self, layer: Any) -> Any:
        return lambda x: nn.functional.dropout(layer[0](x).tanh(), 0.5, self.training)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # torch says so where gradients are off
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["modules", "functions"])
def test_activations_computed_again_have_the_same_masks(how: str, reentrant: bool) -> None:
    def run(model: Any, x: Tensor) -> Any:
        x.requires_grad_()
        return [plainly(model, x) for _ in range(2)], x.grad

    check(lambda: Checkpointed(how, reentrant), run, [normal(6, 4, 6)])


# --- plain inputs


class Scaling(Part):
    """A module that writes into its input. silently: without autograd."""

    def __init__(self, silently: bool = False) -> None:
        super().__init__()
        self.first, self.silently = nn.Linear(6, 6), silently

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.silently):
            x.mul_(2).clamp_(max=0.5)
        return self.first(x)


HAND_CUT: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "batch first": (lambda: Net(APART["along the sequence"]), lambda m, x: m(x)),
    "time first": (Recurrent, lambda m, x: m(x.transpose(0, 1))),
    "with labels": (lambda: Net(lambda m, x, y: (x.mean(1) - y).abs()), lambda m, x: m(x, x[:, 0])),
    "by name": (lambda: Net(lambda m, x, y: x * y), lambda m, x: m(x, y=x[:, :1])),
    "loss": (lambda: Net(TOGETHER["loss"]), lambda m, x: m(x)),
    "written into": (lambda: Net(lambda m, x, y: x + y.mul_(2)), lambda m, x: (m(x, x2 := x * 1), x2)),
    "written into, then saved": (Scaling, lambda m, x: (m(x := x * 1), x)),
    "written into by parameters": (lambda: Net(lambda m, x, y: y.mul_(m.first.bias).sum()), lambda m, x: (m(x, x),)),
    "given back": (lambda: Net(lambda m, x, y: y.add_(x)), lambda m, x: (m(x, y := x * 1).data.mul_(2), y)),
}


@pytest.mark.parametrize("name", HAND_CUT)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3), (2, 3)])
def test_a_batch_that_was_cut_by_hand(name: str, n: int, world_size: int) -> None:
    build, call = HAND_CUT[name]

    def run(model: Any, x: Tensor) -> Any:
        found = []
        for part in (x, x + 1, x + 2):
            out = call(model, part)
            scalar(out).backward()
            found.append(out)
        return found

    check(build, run, [normal(n, 8, 6)], world_size, rows=())


HISTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "short": lambda x: x * 3,
    "long": lambda x: sum((x * step for step in range(40)), start=x),
    "part": lambda x: torch.cat([x * 3, x])[: len(x)],
    "time first": lambda x: (x * 3).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("silently", [False, True], ids=["recorded", "silently"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("n", "world_size"), [(8, 2), (7, 3)])
def test_the_gradient_of_a_plain_input_that_a_module_writes_to(
    history: str, silently: bool, n: int, world_size: int
) -> None:
    def run(model: Any, x: Tensor) -> Any:
        found = []
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            plain = HISTORIES[history](leaf)
            out = model(plain)
            scalar((out, plain**3)).backward()
            found += [out, plain, mean_of_ranks(leaf.grad)]
        return found

    check(lambda: Scaling(silently), run, [normal(n, 8, 6)], world_size, rows=())


@pytest.mark.parametrize("silently", [False, True], ids=["recorded", "silently"])
def test_a_plain_input_that_was_saved_before_a_module_writes_to_it_is_an_error(silently: bool) -> None:
    def run(model: Any, x: Tensor) -> Any:
        plain = x.clone().requires_grad_() * 1
        saved = plain**3
        model(plain)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()

    check(lambda: Scaling(silently), run, [normal(8, 8, 6)], rows=())


def mean_of_ranks(gradient: Tensor | None) -> Tensor | None:
    """The gradient of an adopted leaf as a strategy would average it."""
    here = calls()
    if here is None or gradient is None:
        return gradient
    return here.view.ranks.all_reduce(gradient) / here.view.ranks.world_size


def on_one_rank_each(world_size: int, model: nn.Module, x: Tensor, converts: bool = True) -> list[Any]:
    def on_rank(view: View) -> Any:
        HERE.calls, HERE.seen = ModuleCalls(view, converts), []
        return model(x)

    return on_ranks(world_size, on_rank)


@pytest.mark.parametrize(
    ("n", "converts", "batch"), [(6, True, True), (6, False, False), (1, True, False)], ids=["6", "api", "small"]
)
def test_which_plain_inputs_are_batches(n: int, converts: bool, batch: bool) -> None:
    x = normal(n, 3)
    for out in on_one_rank_each(2, nn.Linear(3, 2), x, converts):
        assert isinstance(out, BatchTensor) == batch
        assert out.shape == (n, 2)


def test_a_module_without_parameters_takes_plain_inputs_as_they_are() -> None:
    for out in on_one_rank_each(2, nn.Tanh(), normal(6, 3)):
        assert not isinstance(out, BatchTensor)


def test_the_batch_of_a_time_first_input_is_found() -> None:
    """Along the time an LSTM would be computed whole; the second dimension is tried then, and kept."""

    dims: list[Any] = []

    class Looking(nn.LSTM):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            if isinstance(x, BatchTensor):
                dims.append((x._spec.view.ranks.rank, x._spec.dim))
            return super().forward(x, state)

    x = normal(6, 4, 3)
    torch.manual_seed(0)
    model = Looking(3, 2)
    expected = model(x)[0]

    def on_rank(view: View) -> list[Tensor]:
        HERE.calls, HERE.seen = ModuleCalls(view), []
        return [whole_of(model(x)[0]) for _ in range(4)]

    for found in in_turns(2, on_rank):
        for out in found:
            torch.testing.assert_close(out, expected)
    for rank in range(2):
        assert [dim for where, dim in dims if where == rank] == [0, 1, 1, 1]


# --- what is not seen as torch functions


def test_a_scripted_module_is_computed_whole() -> None:
    def build() -> nn.Module:
        return torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))

    def run(model: Any, x: Tensor) -> Any:
        return plainly(model, x.mean(1)), model[1].running_mean

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        assert check(build, run, [normal(6, 4, 6)]) == [["whole"]] * 2


def test_a_thread_of_the_script_s_own_is_left_alone() -> None:
    model, x = nn.Linear(6, 2), normal(6, 6)

    def run(view: View) -> Any:
        HERE.calls, HERE.seen = ModuleCalls(view), []
        found: list[Any] = []
        seen = HERE.calls

        def elsewhere() -> None:
            HERE.calls, HERE.seen = seen, []
            found.append(model(x))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return found[0]

    for out in on_ranks(2, run):
        assert type(out) is Tensor


def test_parameters_that_come_later_are_the_first_rank_s() -> None:
    """Each rank has others, as an unseeded source would give them."""

    def on_rank(view: View) -> list[Tensor]:
        rank = float(view.ranks.rank)
        model = Net(lambda m, x: x)

        def run(model: Any, x: Tensor) -> list[Tensor]:
            model(x)
            model.register_buffer("late", torch.full((6,), rank))
            calls().changed(model)  # type: ignore[union-attr]
            model.then = lambda m, x: x + m.late
            return [model.late.clone() for _ in [model(x)]]

        return on_this_rank(view, lambda: model, run, [shared(view, normal(6, 4, 6))])[0]

    for [late] in in_turns(2, on_rank):
        assert late.tolist() == [0.0] * 6
