from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from duoka.view.generators import RankStream, random_marks, random_states, set_random_states


def test_a_stream_of_its_own_leaves_the_common_one_as_it_was() -> None:
    torch.manual_seed(1)
    common = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(1)
    one, other = RankStream(5), RankStream(6)
    found, own, others = [], [], []
    for _ in range(4):
        found.append(torch.rand(()).item())
        with one:
            own.append(torch.rand(()).item())
        with other:
            others.append(torch.rand(()).item())
    assert found == common
    assert len({*common, *own, *others}) == 12
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert own == [torch.rand(()).item() for _ in range(4)]


def test_the_common_stream_comes_back_after_an_error() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(ValueError), RankStream(5):  # noqa: PT012
        torch.rand(3)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.rand], ids=["torch", "random", "numpy"]
)
def test_what_was_drawn_is_seen_and_taken_back(draw: Callable[[], Any]) -> None:
    before, mark = random_states(), random_marks()
    assert mark == random_marks()
    first = draw()
    assert mark != random_marks()
    set_random_states(before)
    assert mark == random_marks()
    assert draw() == first


def test_a_draw_from_another_kind_of_numpy_s_generator_is_seen() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64())
    try:
        mark = random_marks()
        assert mark == random_marks()
        np.random.rand()
        assert mark != random_marks()
    finally:
        np.random.set_bit_generator(usual)


def test_an_own_stream_within_itself_changes_nothing() -> None:
    torch.manual_seed(0)
    common = torch.get_rng_state()
    flat, nested = RankStream(5), RankStream(5)
    with flat:
        expected = torch.rand(3)
    with nested:
        first = torch.rand(1)
        with nested:
            second = torch.rand(1)
        third = torch.rand(1)
    assert torch.cat([first, second, third]).tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), common)
