from __future__ import annotations

import pytest
import torch
from torch import nn

from duoka.proving import recorder
from duoka.proving.recorder import Nudge


def test_every_number_moves_by_its_last_place_once() -> None:
    model = nn.Linear(100, 50)
    with torch.no_grad():
        model.weight[0, 0] = 0.0
    before = model.weight.detach().clone()
    state = torch.get_rng_state()
    mover = Nudge(0)
    mover.move(model.parameters())
    moved = model.weight.detach().clone()
    mover.move(model.parameters())
    assert torch.equal(model.weight, moved)
    assert torch.equal(torch.get_rng_state(), state)
    apart = (moved - before).abs() / before.abs()
    assert moved[0, 0] == 0
    assert apart[1:].min() > 0
    assert apart[1:].max() <= 2 * torch.finfo(torch.float32).eps
    assert 0.4 < (moved > before).double().mean() < 0.6


def test_two_seeds_move_otherwise() -> None:
    first, second = (torch.ones(100).requires_grad_() for _ in range(2))
    Nudge(0).move([first])
    Nudge(1).move([second])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_a_coarse_type_some_numbers_move_by_its_last_place(autocast: bool) -> None:
    weight = torch.ones(10_000, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        Nudge(0).move([weight])
    moved = weight.double() != 1
    assert 0.5 * recorder.SOME < moved.double().mean() < 2 * recorder.SOME
    assert (weight.double()[moved] - 1).abs().max() == torch.finfo(torch.bfloat16).eps


def test_whole_numbers_stay() -> None:
    counter = torch.ones(3, dtype=torch.int64)
    Nudge(0).move([counter])
    assert counter.tolist() == [1, 1, 1]
