from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.view.aliases import Aliases

weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
lstm = nn.LSTM(4, 4)
norm = nn.LayerNorm(4)
beside = torch.ones(4, requires_grad=True)
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "operators": lambda x: x @ weight + bias,
    "a function of keywords": lambda x: F.linear(input=x, weight=weight, bias=bias),
    "lists": lambda x: torch.cat([x, weight, torch.stack([bias, bias])]),
    "a list in C": lambda x: lstm(x[None])[0],
    "a function of functions": lambda x: norm(x) * beside,
    "an operator of aten": lambda x: torch.ops.aten.mul.Tensor(x, weight),
    "a view of it": lambda x: x * weight.t().reshape(4, 4)[0],
}


@pytest.mark.parametrize("use", USES)
def test_aliases_stand_for_leaves_wherever_they_are_used(use: str) -> None:
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def alias(leaf: Tensor) -> Tensor:
        return given.setdefault(id(leaf), (leaf, leaf.detach().requires_grad_()))[1]

    x = torch.randn(4, 4)
    expected = USES[use](x)
    expected.sum().backward()
    leaves = [
        leaf for leaf in (weight, bias, beside, *lstm.parameters(), *norm.parameters()) if leaf.grad is not None
    ]
    with Aliases(alias):
        found = USES[use](x)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    found.sum().backward()
    assert torch.equal(found, expected)
    assert leaves
    for leaf, grad in zip(leaves, grads, strict=True):
        assert leaf.grad is None
        assert torch.equal(given[id(leaf)][1].grad, grad)  # type: ignore[arg-type]


def test_what_is_no_use() -> None:
    def alias(leaf: Tensor) -> Tensor:
        raise AssertionError

    with Aliases(alias), torch.no_grad():
        weight.mul_(1)
    with Aliases(alias):
        weight.grad = torch.ones(4, 4)
        weight.requires_grad_(True)
    weight.grad = None
