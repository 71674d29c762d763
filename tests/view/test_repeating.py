from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.view.repeating import Repeating


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]
        self.register_buffer("steps", torch.zeros(()))

    def forward(self) -> tuple[int, float, float, float]:
        self.calls += 1
        self.seen.append(self.calls)
        self.steps.add_(1)
        print("called")
        return self.calls, self.steps.item(), torch.rand(()).item(), random.random()


def test_all_calls_are_alike_and_leave_what_one_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    module, found = Counting(), []
    torch.manual_seed(0)
    random.seed(0)
    repeating = Repeating(module, traces=True)
    for _ in range(3):
        with repeating.rehearsal():
            found.append(module())
    with repeating.last():
        found.append(module())
    assert found == [found[0]] * 4
    assert (module.calls, module.seen, module.steps.item()) == (1, [0, 1], 1.0)
    assert capsys.readouterr().out == "called\n"
    torch.manual_seed(0)
    random.seed(0)
    again = Counting()()
    assert again == found[0]


def test_a_write_that_nobody_expected() -> None:
    module = Counting()
    repeating = Repeating(module, traces=False)
    with pytest.raises(Refused, match="writes into its parameters or buffers"), repeating.rehearsal():
        module()


def test_samples_that_draw_otherwise() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(int(x))

    module = Drawing()
    repeating = Repeating(module, traces=False)
    with repeating.rehearsal():
        module(torch.ones(()))

    def other() -> None:
        with repeating.last():
            module(torch.ones(()) * 2)

    with pytest.raises(Refused, match="draws other random numbers for other samples"):
        other()
