from __future__ import annotations

import torch

from duoka.planning.options import RunSettings
from duoka.strategies import Strategy, create
from tests.view.ranks import Table, ThreadRanks


def test_parameters_and_gradients_are_left_as_they_are() -> None:
    strategy: Strategy = create(RunSettings(strategy="single"), ThreadRanks(Table(1), 0))
    assert type(strategy) is Strategy
    parameter = torch.ones(3, requires_grad=True)
    strategy.adopt(parameter)
    for _ in range(2):
        with strategy.backward("train.py:1"):
            (parameter * torch.arange(3.0)).sum().backward()
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0, 2, 4]
    assert not parameter._post_accumulate_grad_hooks
