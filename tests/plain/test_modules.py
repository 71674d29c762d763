from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.plain.said import as_python, said

TRAIN = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 6), torch.randn(22, 2))
    model = {}
    x, y = next(iter(DataLoader(data, 8)))
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(data, 8):
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{{loss.item():.4f}}", [f"{{float(b.sum()):.3f}}" for b in model.buffers()])
    print(f"{{model.eval()(x).sum().item():.4f}}")
"""
MODELS = {
    "batch norm": "nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))",
    "batch norm first": "nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 2))",
    "lazy": "nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(5, 2))",
    "dropout": "nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.RReLU(), nn.Linear(5, 2))",
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models_train_as_on_one_device(flow: Flow, model: str) -> None:
    as_python(flow, TRAIN.format(model))


def test_batch_norm_of_each_share_if_asked_for(flow: Flow) -> None:
    source = TRAIN.format(MODELS["batch norm"])
    whole = said(flow, source)
    local = said(flow, source, "--batch-norm", "local")
    assert whole[0].splitlines()[0].split()[0] != local[0].splitlines()[0].split()[0]
