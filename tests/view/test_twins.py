from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before ranks are forked, as it takes seconds
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from duoka.errors import Refused
from tests.run.ranks import on_ranks
from tests.strategies.test_conformance import leaves, weights
from tests.strategies.test_fsdp import LABELS, ROWS, mlp, refused, trained


class Scaled(nn.Module):
    """Goes another way by what it has: an attribute, a buffer, a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 4), nn.Dropout(0.5)
        self.gate = nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.late or self.seen > 1 or self.gate[0] > 1:
            x = self.drop(x)
        return x


@pytest.mark.parametrize("change", ["attribute", "buffer", "weight"])
def test_a_look_sees_the_model_as_it_is(change: str) -> None:
    """Else what it draws would be unknown, and an error."""

    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(Scaled(), strategy=strategy)
        found = []
        for number, (x, y) in enumerate(run.loader((ROWS, LABELS), 9)):
            if number == 1:  # the second call is looked at again
                model.late = change == "attribute"
                model.seen.fill_(2.0 * (change == "buffer"))
                with torch.no_grad():
                    model.gate.fill_(2.0 * (change == "weight"))
            found.append(F.cross_entropy(model(x), y).item())
        return found

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(2, lambda run: work(run, "fsdp")):
        assert found == pytest.approx(expected, rel=1e-5)


def test_layers_that_are_skipped_at_random() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) for _ in range(4))
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if torch.rand(()).item() < 0.5:
                    x = x + block(x)
            return self.head(x)

    (expected,) = on_ranks(1, lambda run: trained(run, Skipping, "auto"))
    for found in on_ranks(2, lambda run: trained(run, Skipping, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-5)


def test_a_model_whose_samples_meet_is_computed_whole_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(WithLoss(), strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for x, y in run.loader((ROWS, LABELS), 9):
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, weights(model)

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-5)
    assert "is computed whole by every rank, as it gives a result of the batch as a whole" in capfd.readouterr().err


def test_a_part_is_not_called_by_itself() -> None:
    def part(run: duoka.Run) -> None:
        model = run.model(mlp(), strategy="fsdp")
        for x, _ in run.loader((ROWS, LABELS), 9):
            model[0](x)

    refused(part, Refused, "Linear at .* is a part of a model of strategy='fsdp'")


def swap(model: Any) -> None:
    model.drop = nn.Identity()


def tie(model: Any) -> None:
    model.gate = model.layer.bias


def replace(model: Any) -> None:
    model.gate = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("change", [swap, tie, replace])
def test_a_model_is_not_changed_after(change: Callable[[nn.Module], None]) -> None:
    """torch would go on with the old parameters."""

    def changed(run: duoka.Run) -> None:
        model = run.model(Scaled(), strategy="fsdp")
        change(model)
        for x, _ in run.loader((ROWS, LABELS), 9):
            model(x)

    refused(changed, Refused, "parts of .*Scaled were changed after run.model")
