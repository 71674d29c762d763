from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_data_parallel_passes_through(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1], dim=0)
        also = torch.nn.parallel.DataParallel(module=nn.Linear(3, 2))
        print(type(model).__name__, type(model.module).__name__, list(model.state_dict()), model.device_ids)
        print(isinstance(also, nn.DataParallel), list(also.module.state_dict()))
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(5, 3)), 5)))
        loss = model(x).pow(2).mean() + also(input=x).sum()
        loss.backward()
        print(f"{loss.item():.5f} {model.module.weight.grad.sum():.5f} {also.module.weight.grad.sum():.5f}")
        """
    assert as_python(flow, source.replace(", model.device_ids", ""))
