"""A function that was called before gives what its rule would, whatever has changed since."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from duoka.view.dispatch.replay import DescribedCall
from duoka.view.recent import Recent
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.outcome import backward_name
from duoka.view.view import View
from tests.view.ranks import ThreadRanks, in_turns, on_ranks, shared, whole_of
from tests.view.rules.operations import cases, difference
from tests.view.rules.test_against_torch import REDUCED, SHARED, WHOLE, _inputs, _values


class _Always(Recent):
    def __missing__(self, key: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def _recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are recorded the first time, not only when they come a second time."""
    make = View.__init__

    def made(view: View, *args: Any, **kwargs: Any) -> None:
        make(view, *args, **kwargs)
        view.calls = _Always(2)

    monkeypatch.setattr(View, "__init__", made)


OPERATIONS = SHARED | REDUCED | WHOLE


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_values_in_the_same_calls(name: str) -> None:
    """The first time without gradients, so that what is replayed was recorded without them."""
    operation = OPERATIONS[name]
    expected = [_values(operation, _inputs(5, seed), None) for seed in (2, 3)]

    def on_rank(view: View) -> list[dict[str, Any]]:
        first = _inputs(5, 1)
        with torch.no_grad():
            operation(**first | {name: shared(view, first[name]) for name in ("x", "y", "c")})
        return [_values(operation, _inputs(5, seed), view) for seed in (2, 3)]

    for found in on_ranks(2, on_rank):
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(other[key], value)
                else:
                    assert other[key] == value


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": torch.enable_grad,
    "none": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_replays_in_another_mode_agree_with_the_rule(name: str) -> None:
    """Recorded in one mode and replayed in each other, a call gives what its rule gives there."""
    operation = OPERATIONS[name]

    def outcome(mode: str, view: View) -> list[Any]:
        given = _inputs(5, 1)
        torch.manual_seed(1)
        with MODES[mode]():
            try:
                out = operation(**given | {one: shared(view, given[one]) for one in ("x", "y", "c")})
            except RuntimeError as error:
                return [str(error)]
            leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            return [(leaf.requires_grad, leaf.dtype, leaf.is_inference(), whole_of(leaf)) for leaf in leaves]

    def on_rank(view: View) -> None:
        by_rule = {mode: outcome(mode, View(view.ranks, adopt=lambda leaf: None)) for mode in MODES}
        for first in MODES:
            recorded = View(view.ranks, adopt=lambda leaf: None)
            outcome(first, recorded)
            for mode in MODES:
                for one, other in zip(by_rule[mode], outcome(mode, recorded), strict=True):
                    if isinstance(one, str):
                        assert one == other, (first, mode)
                        continue
                    *kind, values = one
                    assert kind == [*other[:-1]], (first, mode)
                    torch.testing.assert_close(other[-1], values, rtol=0, atol=0, equal_nan=True)

    in_turns(2, on_rank)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_other_values_in_torchs_own_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    for operation in op_db:
        known = []
        for case in cases(operation, 3, (0, 1)):
            if case.rows < 2:
                continue
            turned = [leaf.flip(tuple(range(leaf.dim()))) if _is_strided(leaf) else leaf for leaf in case.leaves]
            other = type(case)(case.name, case.function, turned, case.tree, case.batches, case.dim)
            try:
                known += [(case, case.run(None, True)), (other, other.run(None, True))] * 2
            except Exception:
                continue

        def on_rank(view: View, known: Any = known) -> list[str]:
            texts = []
            for case, expected in known:
                try:
                    text = difference(expected, case.run(view, True), case.name)
                except Exception as error:
                    text = None if type(error).__name__ == "Refused" else f"{type(error).__name__}: {error}"
                texts += [f"{case}: {text}"] if text else []
            return texts

        assert not [text for texts in in_turns(2, on_rank) for text in texts]


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


# --- one call after the other, in one view

Step = Callable[[Tensor], Any]  # what is done with a batch of shape (6, 4), and what comes of it


def normal(*shape: int, seed: int = 0, **how: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **how)


def steps_are_one_devices(*steps: Step, make: Callable[[int], Tensor] = lambda seed: normal(6, 4, seed=seed)) -> None:
    """Each step, with another batch, gives and raises on each rank what it does on one device; all of it twice."""
    steps = steps * 2

    def run(step: Step, x: Tensor) -> Any:
        torch.manual_seed(1)
        try:
            out = step(x)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        parts = list(out) if isinstance(out, (tuple, list)) else [out]
        return [whole_of(one) for one in (*parts, x)]

    expected = [run(step, make(seed)) for seed, step in enumerate(steps)]

    def on_rank(view: View) -> list[Any]:
        return [run(step, shared(view, make(seed))) for seed, step in enumerate(steps)]

    for found in in_turns(2, on_rank):
        for one, other in zip(expected, found, strict=True):
            assert type(one) is type(other), (one, other)
            if isinstance(one, str):
                assert other == one
                continue
            for a, b in zip(one, other, strict=True):
                if isinstance(a, Tensor):
                    assert a.dtype == b.dtype
                    torch.testing.assert_close(b, a, equal_nan=True)
                else:
                    assert type(a) is type(b)
                    assert a == b


def test_floats_that_vary() -> None:
    steps_are_one_devices(
        *(lambda x, by=by: F.leaky_relu(x * by + by, by) - by for by in (0.5, 0.25, 0.0, -1.0, float("inf"), 0.5)),
        *(lambda x, by=by: x.clamp(-by, by).pow(by) for by in (2.0, 0.5, 0.0)),
        *(lambda x, by=by: torch.complex(x, x) * by for by in (2j, 0j, 1 + 1j)),
        *(lambda x, by=by: torch.add(x, x, alpha=by) for by in (2.0, 0.5)),
        *(lambda x, by=by: (x * by, by * x, x + by) for by in (1.5, 1.5, 2.5)),
    )


CALLS: list[Callable[..., Any]] = [
    lambda x, a: x * a,
    lambda x, a: a - x,
    lambda x, a: x.clamp(min=a),
    lambda x, a: F.dropout(x, abs(a) % 1.0),
    lambda x, a: F.leaky_relu(x, a),
    lambda x, a: x.add_(a),
    lambda x, a: x[:, int(a) :],
    lambda x, a: x.sum(int(a) % 2),
    lambda x, a: torch.cat([x, x * a], 1).softmax(int(a) % 2),
    lambda x, a: F.layer_norm(x, (4,), eps=abs(a) + 1e-3),
]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from([0, 1, 0.0, 1.0, 0.4, 0.7, 2.5])), max_size=12))
def test_calls_in_any_order(calls: list[tuple[Callable[..., Any], float]]) -> None:
    steps_are_one_devices(*(lambda x, call=call, a=a: call(x, a) for call, a in calls))


def test_numbers_that_are_equal_but_of_another_kind() -> None:
    make = lambda seed: torch.arange(24).view(6, 4) + seed  # noqa: E731
    kinds: list[Any] = [1, 1.0, True, 1 + 0j, torch.tensor(1), torch.tensor(1.0)]
    steps_are_one_devices(*(lambda x, one=one: (x * one, x + one) for one in kinds), make=make)
    steps_are_one_devices(*(lambda x, one=one: x.sum(1, one) for one in (True, False)), make=make)


@pytest.mark.parametrize("p", [(0.0, 0.5, 0.0, 0.2), (0.4, 0.0, 1.0, 0.4)], ids=str)
def test_a_probability_that_varies(p: tuple[float, ...]) -> None:
    steps_are_one_devices(*(lambda x, p=p: (F.dropout(x, p), torch.rand(2)) for p in p))


def test_writes_reach_the_same_memory() -> None:
    def written(x: Tensor, by: float) -> Any:
        first = x[:, :2]
        x += by
        x.mul_(2).clamp_(min=-1)
        first.neg_()
        x[:, 3] = by
        torch.relu_(x)
        return first

    steps_are_one_devices(*(lambda x, by=by: written(x, by) for by in (1.0, 3.0, -2.0)))


def test_which_arguments_are_one_tensor() -> None:
    y = normal(6, 4, seed=9)
    steps_are_one_devices(
        lambda x: x.add_(x),
        lambda x: x.add_(x.clone()),
        lambda x: torch.addcmul(x, x, x),
        lambda x: torch.addcmul(x, y, x * 2),
        lambda x: torch.stack([x, x * 2, x]),
        lambda x: torch.stack([x, x, x * 2]),
    )


def test_what_is_given_back_as_it_is() -> None:
    def on_rank(view: View) -> None:
        for seed in range(3):
            x = shared(view, normal(6, 4, seed=seed))
            for one in (x.add_(1), x.requires_grad_(False), x.mul_(x), torch.relu_(x), x.detach_()):
                assert one is x
            assert x.add(1) is not x

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    "steps",
    [
        [lambda x: x @ normal(4, 3), lambda x: x @ normal(5, 3)],
        [lambda x: F.one_hot(x[:, 0].abs().long() % 3, 3), lambda x: F.one_hot(x[:, 0].abs().long() + 3, 3)],
        [lambda x: x + normal(6, 1), lambda x: x + normal(5, 1)],
        [lambda x: x.reshape(6, 2, 2), lambda x: x.reshape(6, 3, 2)],
        [lambda x: torch.cat([x, x], 1), lambda x: torch.cat([x, x[:, 0]], 1)],
    ],
    ids=["matrices", "values", "rows", "size", "dimensions"],
)
def test_errors_are_one_devices(steps: list[Step]) -> None:
    steps_are_one_devices(*steps, *reversed(steps))


@pytest.mark.parametrize("first", [True, False])
def test_autocast_between_calls(first: bool) -> None:
    weight, target = normal(3, 4, seed=8), torch.tensor([0, 1, 2, 0, 1, 2])

    def step(x: Tensor, enabled: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = F.linear(x, weight)
            losses = F.cross_entropy(scores, target), F.cross_entropy(x.bfloat16(), target)
            return scores, scores * 2, scores.softmax(1), *losses, scores.mm(weight)

    steps_are_one_devices(*(lambda x, on=on: step(x, on) for on in (first, not first, first)))


def test_another_default_type_between_calls() -> None:
    def step(x: Tensor, dtype: torch.dtype) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return x / 2, x * 1.5
        finally:
            torch.set_default_dtype(before)

    make = lambda seed: torch.arange(24).view(6, 4) + seed  # noqa: E731
    kinds = (torch.float32, torch.float64, torch.float32)
    steps_are_one_devices(*(lambda x, dtype=dtype: step(x, dtype) for dtype in kinds), make=make)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_between_dense() -> None:
    dense = normal(4, 4, seed=5).relu()
    steps_are_one_devices(
        lambda x: torch.mm(x, dense),
        lambda x: torch.mm(x, dense.to_sparse_csr()),
        lambda x: torch.mm(x, dense),
    )


# --- gradients


def backward(view: View | None, x: Tensor, weights: list[Tensor], layer: Callable[..., Tensor]) -> list[Any]:
    x = x if view is None else shared(view, x)
    layer(x, *weights).sin().sum().backward()
    grads = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    if view is None:
        return grads
    return [None if grad is None else view.ranks.all_reduce(grad) / view.ranks.world_size for grad in grads]


def test_another_parameter_of_the_same_shape() -> None:
    def run(view: View | None) -> list[Any]:
        found = []
        for seed in range(4):
            weights = [nn.Parameter(normal(3, 4, seed=seed)), nn.Parameter(normal(3, seed=seed))]
            found.append(backward(view, normal(6, 4, seed=seed), weights, F.linear))
        return found

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, run(None))


def test_every_leaf_is_adopted_once() -> None:
    adopted: list[int] = []
    weights = [nn.Parameter(normal(4, 4, seed=seed)) for seed in range(3)]

    def on_rank(one: View) -> None:
        view = View(one.ranks, adopt=lambda leaf: adopted.append(id(leaf)))
        assert isinstance(view.ranks, ThreadRanks)
        for _ in range(3):
            for weight in weights:
                F.linear(shared(view, normal(6, 4)), weight).sum()

    on_ranks(1, on_rank)
    assert adopted == [id(weight) for weight in weights]


def test_gradients_are_asked_for_now_and_then() -> None:
    def run(view: View | None) -> list[Any]:
        weight, bias = nn.Parameter(normal(3, 4)), nn.Parameter(normal(3))
        found = []
        for step in range(6):
            weight.requires_grad_(step % 2 == 1)
            bias.requires_grad_(step % 3 != 1)
            if not (weight.requires_grad or bias.requires_grad):
                continue
            found.append(backward(view, normal(6, 4, seed=step), [weight, bias], F.linear))
            with torch.no_grad() if step % 2 else nullcontext():
                x = normal(6, 4, seed=step)
                out = F.linear(x if view is None else shared(view, x), weight, bias)
                found.append(out.requires_grad)
        return found

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, run(None))


def test_a_tensor_that_is_computed_from_parameters() -> None:
    """The first is a leaf, the second not, the third comes from a Function of the script's own."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad.clamp(-1, 1)

    made: list[Callable[[Tensor], Tensor]] = [
        lambda w: w,
        lambda w: w * 2 + w.sum(),
        Twice.apply,
        lambda w: w.detach(),
    ]

    def run(view: View | None) -> list[Any]:
        weight, scale = nn.Parameter(normal(3, 4).double()), nn.Parameter(normal(3, 1).double())
        layer = [lambda x, w, s, m=m: F.linear(x, m(w)) @ s for m in made]
        return [backward(view, normal(6, 4, seed=at).double(), [weight, scale], layer[at % 4]) for at in range(8)]

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, run(None))


# --- keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((0,), (False,)),
        (([1],), ((1,),)),
        ((slice(1),), (slice(True, 1),)),
        (("a",), (b"a",)),
        ((None,), (0,)),
        ((torch.zeros(2),), (torch.zeros(3),)),
        ((torch.zeros(2),), (torch.zeros(2).int(),)),
        ((0.0,), (0.5,)),
    ],
    ids=str,
)
def test_keys_that_differ(one: Any, other: Any) -> None:
    keys = [DescribedCall(torch.add, args, {}).key for args in (one, other)]
    assert None in keys or keys[0] != keys[1]


@pytest.mark.parametrize(
    "args",
    [(object(),), ({1, 2},), (slice(torch.tensor(1)),), (lambda: 0,)],
    ids=["object", "set", "slice", "function"],
)
def test_arguments_of_which_no_key_can_be_made(args: Any) -> None:
    assert DescribedCall(torch.add, args, {}).key is None


def test_few_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.view.view.KEPT", 3)

    def on_rank(view: View) -> int:
        for n in range(2, 12):
            for dim in (1, 0):
                out = shared(view, normal(n, 2)) * 2 + dim
                torch.testing.assert_close(whole_of(out), normal(n, 2) * 2 + dim)
        return max(len(view.programs), len(view.metas))

    assert max(on_ranks(2, on_rank)) <= 3


def test_a_call_is_recorded_when_it_comes_a_second_time() -> None:
    def on_rank(view: View) -> list[int]:
        view.calls = Recent(8)
        x, found = shared(view, normal(6, 4)), []
        for _ in range(3):
            torch.testing.assert_close(whole_of(x * 2), normal(6, 4) * 2)
            found.append(len(view.programs))
        return found

    assert on_ranks(2, on_rank) == [[0, 1, 1]] * 2


def test_a_call_that_meets_other_ranks_is_not_replayed() -> None:
    def on_rank(view: View) -> list[bool]:
        x = shared(view, normal(6, 4))
        found = []
        for function in (lambda: x * 2, lambda: x.amax(), lambda: F.dropout(x, 0.5)):
            before = len(view.programs)
            function()
            found.append(len(view.programs) > before)
        return found

    for found in in_turns(2, on_rank):
        assert found == [True, False, False]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: (x > 0).all(),
        lambda x: F.mse_loss(x, normal(6, 4)),
        lambda x: torch.einsum("ni,nj->ij", x, x),
    ],
    ids=["sum", "all", "mse_loss", "einsum"],
)
def test_a_sum_over_all_ranks_is_part_of_a_program(function: Callable[[Tensor], Tensor]) -> None:
    modes = torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad
    leaf = normal(6, 4).requires_grad_()
    name = type(function(leaf * 1).grad_fn).__name__

    def on_rank(view: View) -> None:
        x, programs = shared(view, leaf) * 1, set()
        with torch.no_grad():
            function(x)
        for mode in modes:
            collectives = view.ranks.begun
            with mode():
                out = function(x)
            assert view.ranks.begun == collectives + 1
            torch.testing.assert_close(out, function(leaf * 1), check_device=False)
            if out.requires_grad:
                assert backward_name(out) == name
            programs.add(len(view.programs))
        assert len(programs) == 1

    on_ranks(2, on_rank)


def test_batch_norm_in_training_is_a_program() -> None:
    batches = [normal(6, 4, seed=seed) for seed in range(4)]

    def layer(x: Tensor, step: int, running: list[Tensor]) -> Tensor:
        return F.batch_norm(x, *running, None, None, True, 0.1 * (step + 1), 1e-5)

    running = [torch.zeros(4), torch.ones(4)]
    expected = [(layer(x, step, running), *map(torch.clone, running)) for step, x in enumerate(batches)]

    def on_rank(view: View) -> None:
        running, programs = [torch.zeros(4), torch.ones(4)], set()
        for step, (x, (normalised, *after)) in enumerate(zip(batches, expected, strict=True)):
            collectives = view.ranks.begun
            out = layer(shared(view, x), step, running)
            assert view.ranks.begun == collectives + 1
            torch.testing.assert_close((out.full_tensor(), *running), (normalised, *after), check_device=False)
            programs.add(len(view.programs))
        assert programs == {1}

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, normal(5, 4)),
        lambda x: F.linear(x.transpose(1, 2), normal(5, 3)),
        lambda x: F.mse_loss(x, normal(2, 3, 4)),
    ],
    ids=["linear", "linear_of_a_transposed_batch", "mse_loss"],
)
def test_products_and_losses_of_single_rows_are_programs(function: Callable[[Tensor], Tensor]) -> None:
    def on_rank(view: View) -> None:
        for seed in range(3):
            x = normal(2, 3, 4, seed=seed)
            out = function(shared(view, x))
            torch.testing.assert_close(whole_of(out), function(x), check_device=False)
            if seed == 0:
                programs = len(view.programs)
        assert 0 < programs == len(view.programs)

    on_ranks(2, on_rank)


def test_batches_are_told_apart_by_their_place() -> None:
    def on_rank(view: View) -> list[Any]:
        whole = normal(4, 4)
        return [
            [whole_of(shared(view, whole, dim).sum(1)), type(shared(view, whole, dim).sum(1))] for dim in (0, 1, 0, 1)
        ]

    for found in on_ranks(2, on_rank):
        for value, _ in found:
            torch.testing.assert_close(value, normal(4, 4).sum(1))
        assert [kind for _, kind in found] == [BatchTensor, Tensor] * 2
