from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.view.rules.draws import draw_lines
from duoka.view.rules.randomness import placing
from duoka.view.view import View
from tests.view.nets import Net, check, normal, plainly, watched
from tests.view.ranks import in_turns, shared, whole_of

__all__ = ["watched"]

Draw = Callable[[Tensor], Tensor]

# x: (n, 4, 6). Each uses what the tensor is, so that it can be anywhere: rows, or the whole.
OF_A_TENSOR: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "dropout of a transposed": lambda x: F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2),
    "dropout, sequence first": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "dropout, batch last": lambda x: F.dropout(x.permute(1, 2, 0), 0.3).permute(2, 0, 1),
    "dropout, side by side": lambda x: F.dropout(x.reshape(-1, 6), 0.3).view(-1, 4, 6),
    "dropout, strided": lambda x: F.dropout(x.transpose(0, 1).reshape(-1, 6), 0.3).view(4, -1, 6).transpose(0, 1),
    "dropout of a part": lambda x: F.dropout(x[:, 1:3], 0.3).sum(1, keepdim=True) + x,
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of double": lambda x: F.dropout(x.double(), 0.3),
    "dropout of bfloat16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "two": lambda x: F.dropout(F.dropout(x, 0.2).sin(), 0.5),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, True),
    "rrelu in place": lambda x: F.rrelu(x - 1, 0.1, 0.9, True, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randn_like of a transposed": lambda x: x + torch.randn_like(x.transpose(0, 1)).transpose(0, 1),
    "randint_like": lambda x: x + torch.randint_like(x, 9),
    "normal_": lambda x: x + (x * 1).normal_(),
    "normal_ of a transposed": lambda x: x + (x.transpose(0, 2) * 1).normal_().transpose(0, 2),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "bernoulli_": lambda x: x * torch.ones_like(x).bernoulli_(0.7),
    "bernoulli_ of probabilities": lambda x: x * torch.ones_like(x).bernoulli_(x.sigmoid()),
    "exponential_": lambda x: x / (1 + torch.empty_like(x).exponential_()),
    "random_": lambda x: x + torch.zeros_like(x).random_(9),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "normal": lambda x: x + torch.normal(x.detach(), x.detach().abs() + 0.1),
    "normal of one deviation": lambda x: x + torch.normal(x.detach(), 0.1),
    "poisson": lambda x: x + torch.poisson(x.detach().exp()),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 9), x.detach().sigmoid()),
    "multinomial": lambda x: x + torch.multinomial(x[:, 0].detach().exp(), 3).sum(1)[:, None, None],
    "multinomial with replacement": lambda x: (
        x + torch.multinomial(x[:, 0].detach().exp(), 9, replacement=True).sum(1)[:, None, None]
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "bernoulli, time first": lambda x: (
        x + torch.bernoulli(x.detach().transpose(0, 1).reshape(-1, 6).sigmoid()).view(4, -1, 6).transpose(0, 1)
    ),
}
# These make a tensor of the batch's size, which every rank has whole.
OF_A_SIZE: dict[str, Draw] = {
    "rand": lambda x: x * torch.rand(x.shape),
    "randn": lambda x: x + torch.randn(x.shape[0], 1, 6),
    "randn, batch last": lambda x: x + torch.randn(6, x.shape[0]).t()[:, None],
    "randint": lambda x: x + torch.randint(0, 9, (x.shape[0],))[:, None, None],
    "one number": lambda x: x + torch.rand(()) * torch.randn(6),
    "layer drop": lambda x: x * 2 if torch.rand(()) < 0.5 else x,
    "empty": lambda x: x + torch.empty(x.shape).normal_(),
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
}


partitions = st.integers(2, 4).flatmap(lambda size: st.tuples(st.integers(size, 11), st.just(size)))


@pytest.mark.parametrize("name", OF_A_TENSOR | OF_A_SIZE)
@settings(max_examples=6)
@given(partition=partitions, seed=st.integers(0, 99))
def test_outside_of_a_module(name: str, partition: tuple[int, int], seed: int) -> None:
    draw = OF_A_TENSOR.get(name) or OF_A_SIZE[name]
    whole = normal(partition[0], 4, 6)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    expected, then = draw(whole), torch.rand(3)
    torch.set_rng_state(before)

    def on_rank(view: View) -> tuple[Tensor, Tensor]:
        return whole_of(draw(shared(view, whole))), torch.rand(3)

    for found, after in in_turns(partition[1], on_rank):
        assert torch.equal(found, expected)
        assert torch.equal(after, then)


INSIDE = OF_A_TENSOR | OF_A_SIZE
del INSIDE["dropout of bfloat16"]  # gradients of so few bits are not the same in parts


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize(("sizes", "world_size"), [((8, 5, 2), 2), ((7, 3), 3)])
def test_inside_of_a_module(watched: None, name: str, sizes: tuple[int, ...], world_size: int) -> None:
    """Batches of several sizes: in the last a rank has one row."""

    def then(m: Any, x: Tensor) -> Tensor:
        return INSIDE[name](x)

    def run(model: Any, *batches: Tensor) -> Any:
        return [plainly(model, x) for x in batches]

    torch.manual_seed(3)
    data = [normal(n, 4, 6) for n in sizes]
    check(lambda: Net(then), run, data, world_size, rows=tuple(range(len(sizes))))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 6, 3, dropout=0.4, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.3, batch_first=True),
    "sequential": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.1)),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_draws_hidden_in_layers(watched: None, layer: Callable[[], nn.Module]) -> None:
    def run(model: Any, x: Tensor, y: Tensor) -> Any:
        return [plainly(model, batch) for batch in (x, y, x)]

    torch.manual_seed(3)
    check(layer, run, [normal(6, 4, 6), normal(3, 4, 6)], rows=(0, 1))


@settings(max_examples=20, deadline=None)
@given(
    lines=st.integers(1, 3),
    size=st.one_of(st.integers(1, 99), st.integers(30_000, 100_000)),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    likely=st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0**-60]), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64]),
)
def test_a_part_of_each_line(lines: int, size: int, part: list[float], likely: float, dtype: torch.dtype) -> None:
    one, other = torch.Generator().manual_seed(size), torch.Generator().manual_seed(size)
    whole = torch.empty(lines, size, dtype=dtype).bernoulli_(likely, generator=one)
    start, stop = int(part[0] * size), int(part[1] * size)
    found = torch.empty(lines, stop - start, dtype=dtype)
    draw_lines(found, start, size, likely, other)
    assert torch.equal(found, whole[:, start:stop])
    assert torch.equal(one.get_state(), other.get_state())


def test_a_kernel_that_draws_dropout_inside_is_told() -> None:
    """As fused attention does, and cuDNN's recurrent layers."""
    library = torch.library.Library("duoka_tests", "FRAGMENT")
    library.define("_fused_layer(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("_fused_layer", lambda x, p: x * torch.empty_like(x).bernoulli_(1 - p), "CPU")
    said: list[str] = []

    def on_rank(view: View) -> Tensor:
        view.say = said.append  # type: ignore[method-assign, assignment]
        rows = shared(view, torch.ones(6, 50))
        for chance in (0.5, 0.0):
            with placing(lambda shape: rows._spec):
                out: Tensor = torch.ops.duoka_tests._fused_layer(rows._local, chance)
            if chance:
                assert 0 < out.mean() < 1
        return out

    assert all(torch.equal(out, torch.ones(3, 50)) for out in in_turns(2, on_rank))
    told = "fused_layer draws dropout in its kernel, on each rank for its rows: not the numbers of one device"
    assert [line for line in said if "batch" not in line] == [told] * 2
