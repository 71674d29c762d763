"""An optimizer's step gets rows, or sharded parameters where the script holds copies of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duoka.collectives.process import ProcessCollectives
from duoka.private.torch import SINGLE_STEPS
from duoka.sharding.parameter import Sharded
from duoka.sharding.updates import update_rows
from tests.sharding.test_blocks import inputs, net, on_two, sharded

STEP = getattr(*SINGLE_STEPS[-1])  # of SGD
OPTIONS: dict[str, Any] = {
    "weight_decay": 0.1,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": True,
    "maximize": False,
    "has_sparse_grad": False,
}


@pytest.mark.parametrize("holds_copy", [False, True])
def test_a_step_has_the_numbers_and_states_of_one_device(holds_copy: bool) -> None:
    alone = net()
    alone(inputs()).square().sum().backward()
    states: list[Tensor | None] = [None for _ in alone.parameters()]
    with torch.no_grad():
        STEP([*alone.parameters()], [_grad(p) for p in alone.parameters()], states, None, None, **OPTIONS)

    def work(ranks: ProcessCollectives) -> None:
        model, given = net(), []
        sharding = sharded(ranks, model)
        with sharding.deferring():
            model(inputs()).square().sum().backward()
        parameters: list[nn.Parameter] = [*model.parameters()]
        copy = parameters[0].detach().numpy() if holds_copy else None
        buffers: list[Any] = [None for _ in parameters]

        def update(of: list[Tensor], *lists: Any, **options: Any) -> None:
            given.extend(of)
            STEP(of, *lists, **options)

        with torch.no_grad():
            update_rows(update, parameters, [_grad(p) for p in parameters], buffers, None, None, **OPTIONS)
        assert [isinstance(each, Sharded) for each in given] == [holds_copy] * len(parameters)
        for parameter, buffer, other, state in zip(parameters, buffers, alone.parameters(), states, strict=True):
            assert isinstance(parameter, Sharded)
            torch.testing.assert_close(parameter.full_tensor().detach(), other.detach())
            torch.testing.assert_close(buffer.full_tensor(), state)
            assert parameter._version == other._version
        torch.testing.assert_close(model(inputs()), alone(inputs()))
        if copy is not None:  # it shares the parameter's memory
            torch.testing.assert_close(torch.from_numpy(copy), alone[0][0].weight.detach())

    on_two(work)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
