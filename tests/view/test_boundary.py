from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from duoka.errors import Refused
from duoka.view.batch import BatchTensor
from duoka.view.view import View
from tests.view.modules import (
    Net,
    Part,
    Run,
    boundary,
    check,
    local,
    look,
    normal,
    on_this_rank,
    plainly,
    scalar,
    watched,
)
from tests.view.ranks import in_turns, shared

__all__ = ["watched"]


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)


Pair = namedtuple("Pair", "hidden scores")
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


# --- hooks, objects, errors


def test_hooks_of_the_script_see_the_whole_batch() -> None:
    def run(model: Any, x: Tensor) -> Any:
        sums: list[float] = []
        model(x)
        model.first.register_forward_hook(lambda module, args, out: sums.append(out.sum().item()))
        here = boundary()
        if here is not None:
            here.seams.forget()
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


class Nesting:
    """Objects in lists in objects, one of them twice."""

    def __init__(self, hidden: Tensor) -> None:
        self.layers = [Ordinary(hidden), Ordinary(hidden.transpose(0, 1)), 3]
        self.again = self.layers[0]

    @property
    def hidden(self) -> Any:
        return self.layers[0].hidden * 2 + self.layers[1].hidden.transpose(0, 1) + self.again.hidden  # type: ignore


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor


@pytest.mark.parametrize("kind", [Slots, Ordinary, Nesting, Frozen])
def test_an_object_that_comes_out_holds_the_whole_batch(kind: Any) -> None:
    def run(model: Any, x: Tensor) -> Any:
        scores, made = model(x)
        scalar((scores, made.hidden)).backward()
        return scores, made.hidden

    assert check(lambda: Net(lambda m, x: (x, kind(x))), run, [normal(6, 4, 6)]) == [[3], [3]]


def test_an_object_that_knows_the_batch_s_size_is_the_whole_batch_s() -> None:
    def run(model: Any, x: Tensor) -> Any:
        made = model(x)
        out = made.mean + made.batch_shape[0]
        scalar(out).backward()
        return out

    def then(m: Any, x: Tensor) -> Any:
        return torch.distributions.Normal(x, x.exp())

    assert check(lambda: Net(then), run, [normal(6, 4, 6)]) == [["batch"], ["batch"]]


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
            for _ in range(2):  # the second is looked at again
                model(x)
            model.more = True
            with pytest.raises(Refused, match="gave 2 outputs, but 1 at first"):
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


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modules_are_learned_in_every_gradient_mode(mode: Any) -> None:
    def run(model: Any, x: Tensor) -> Any:
        with mode():
            return [(model(part) * 2).sum().item() for part in (x, x + 1, x + 2)]

    assert check(lambda: Net(CUT["tensor"]), run, [normal(6, 4, 6)]) == [[3] * 3] * 2


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
            here = boundary()
            how = {"use_reentrant": self.reentrant}
            x = checkpoint(inner, x, **how) if here is None else here.checkpoint(checkpoint, inner, (x,), how)
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

    assert check(lambda: Checkpointed(how, reentrant), run, [normal(6, 4, 6)]) == [[3, 3]] * 2
