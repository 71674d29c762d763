"""Under autocast results have the types that torch gives them, and its values but for their few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.view import View
from tests.view.ranks import in_turns, shared, whole_of

USES: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x, t, w: F.cross_entropy(x @ w, t),
    "cross_entropy, summed": lambda x, t, w: F.cross_entropy(x @ w, t, reduction="sum"),
    "cross_entropy, each": lambda x, t, w: F.cross_entropy(x @ w, t, reduction="none"),
    "cross_entropy, smoothed": lambda x, t, w: F.cross_entropy(x @ w, t, label_smoothing=0.1),
    "cross_entropy, soft targets": lambda x, t, w: F.cross_entropy(x @ w, F.one_hot(t, 5).float()),
    "nll_loss": lambda x, t, w: F.nll_loss(F.log_softmax(x @ w, 1), t),
    "mse_loss": lambda x, t, w: F.mse_loss(x @ w, x[:, :5]),
    "l1_loss, summed": lambda x, t, w: F.l1_loss(x @ w, x[:, :5], reduction="sum"),
    "with_logits": lambda x, t, w: F.binary_cross_entropy_with_logits(x @ w, x[:, :5].sigmoid()),
    "kl_div": lambda x, t, w: F.kl_div(F.log_softmax(x @ w, 1), x[:, :5].softmax(1), reduction="batchmean"),
    "mean": lambda x, t, w: (x @ w).mean(),
    "softmax": lambda x, t, w: (x @ w).softmax(1),
    "norm": lambda x, t, w: (x @ w).norm(),
    "pairs": lambda x, t, w: (x @ x.T).logsumexp(1).mean(),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_types_and_values(name: str, world_size: int) -> None:
    draws = torch.Generator().manual_seed(1)
    x, w = torch.randn(7, 6, generator=draws), torch.randn(6, 5, generator=draws)
    target = torch.randint(0, 5, (7,), generator=draws)

    def run(x: Tensor, target: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return USES[name](x, target, w)

    expected = run(x, target)

    def on_rank(view: View) -> Tensor:
        return whole_of(run(shared(view, x), shared(view, target)))  # type: ignore[no-any-return]

    for found in in_turns(world_size, on_rank):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
