from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

import duoka


def rates(optimizer: SGD, scheduler: LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def made() -> tuple[SGD, LRScheduler]:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.4)
    return optimizer, duoka.warmup(optimizer, 3, then=CosineAnnealingLR(optimizer, 4))


def test_scale_lr() -> None:
    assert duoka.scale_lr(0.1, 1024, 256) == pytest.approx(0.4)
    assert duoka.scale_lr(0.1, 1024, 256, rule="sqrt") == pytest.approx(0.2)


def test_warmup_rises_then_follows() -> None:
    cosine = [0.2 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(*made(), 8) == pytest.approx([0.1, 0.2, 0.3, *cosine])


def test_warmup_alone() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.4)
    assert rates(optimizer, duoka.warmup(optimizer, 3), 5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize("done", [1, 3, 5])
def test_warmup_goes_on(done: int) -> None:
    optimizer, scheduler = made()
    rates(optimizer, scheduler, done)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    expected = rates(optimizer, scheduler, 4)
    again, following = made()
    again.load_state_dict(states[0])
    following.load_state_dict(states[1])
    assert rates(again, following, 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda o: duoka.scale_lr(0.1, 0, 32), "batch must be more than 0"),
        (lambda o: duoka.scale_lr(0.1, 64, 32, rule="square"), "rule must be"),  # type: ignore[arg-type]
        (lambda o: duoka.warmup(o, 0), "steps must be"),
        (lambda o: duoka.warmup(o, 2, then=ReduceLROnPlateau(o)), "no metric"),
        (lambda o: duoka.warmup(o, 2, then=CosineAnnealingLR(made()[0], 3)), "same optimizer"),
    ],
)
def test_what_is_refused(call: Any, text: str) -> None:
    with pytest.raises(duoka.OptionError, match=text):
        call(made()[0])
