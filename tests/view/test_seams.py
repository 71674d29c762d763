from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.view.modules import (
    Net,
    Part,
    check,
    local,
    look,
    normal,
    plainly,
    scalar,
    watched,
)

__all__ = ["watched"]


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)


class Recurrent(Part):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, 2)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        look(x.transpose(0, 1))
        return self.cell(x, state)


def _itself(m: Any, x: Tensor) -> Tensor:
    return x


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


def test_a_square_mask_of_the_batch_s_size_is_not_cut() -> None:
    def then(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        look(mask)
        return mask @ x  # steps by steps

    def run(model: Any, x: Tensor, other: Tensor, mask: Tensor) -> Any:
        first, second, third = model(x, mask), model(other, mask), model(x, mask)
        scalar((first, second, third)).backward()
        return first, second, third

    data = [normal(4, 4, 6), normal(6, 4, 6), normal(4, 4).tril()]
    assert check(lambda: Net(then), run, data, rows=(0, 1)) == [[2, 4, 3, 4, 2, 4]] * 2


def test_what_was_learned_holds_for_batches_of_other_sizes() -> None:
    def run(model: Any, *batches: Tensor) -> Any:
        out = [model(x) for x in batches]
        scalar(out).backward()
        return out

    data = [normal(n, 4, 6) for n in (8, 5, 3, 2, 1)]
    found = check(lambda: Net(_itself), run, data, rows=(0, 1, 2, 3))
    assert found == [[4, 2, 1, 1, 1], [4, 3, 2, 1, 1]]


def test_a_batch_smaller_than_the_ranks_stays_whole() -> None:
    assert check(lambda: Net(_itself), plainly, [normal(2, 4, 6)], 3, rows=()) == [[2]] * 3


def test_a_batch_cut_by_hand() -> None:
    def run(model: Any, x: Tensor) -> Any:
        return plainly(model, x[2:8] * 2)

    assert check(lambda: Net(_itself), run, [normal(9, 4, 6)], rows=()) == [[3], [3]]


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

    assert check(lambda: Net(_itself), run, [normal(6, 4, 6), normal(8, 4, 6)]) == [[3, 4], [3, 4]]


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
