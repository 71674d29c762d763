"""torchmetrics, unchanged: it is handed batches, and computes what it would on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import duoka
from tests.run.ranks import on_ranks

DATA = torch.Generator().manual_seed(1)
X, Y = torch.randn(23, 4, generator=DATA), torch.randint(0, 3, (23,), generator=DATA)


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_are_one_devices(ranks: int) -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Linear(4, 3))
        accuracy, metrics = (
            MulticlassAccuracy(3),
            MetricCollection([MulticlassConfusionMatrix(3), MulticlassAUROC(3)]),
        )
        loss, error = MeanMetric(), MeanSquaredError()
        found = []
        for x, y in run.loader((X, Y), batch_size=5):
            scores = model(x)
            found.append(accuracy(scores, y).item())  # the batch's own
            metrics.update(scores.softmax(1), y)
            loss.update(nn.functional.cross_entropy(scores, y), weight=len(x))
            error.update(scores[:, 0], y.float())
        whole = metrics.compute() | {"accuracy": accuracy.compute()}
        return found, [value.tolist() for value in whole.values()], loss.compute().item(), error.compute().item()

    expected = torch.utils._pytree.tree_leaves(on_ranks(1, work)[0])
    for one in on_ranks(ranks, work):
        assert torch.utils._pytree.tree_leaves(one) == pytest.approx(expected, rel=1e-5)
