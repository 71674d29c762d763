from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_what_an_optimizer_updates_is_kept_in_step(flow: Flow) -> None:
    """Parameters of no module, groups that are added later, closures."""
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        data = TensorDataset(torch.randn(12, 3), torch.randn(12))
        weight, bias, scale = torch.randn(3, requires_grad=True), torch.zeros((), requires_grad=True), torch.ones(())
        scale.requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=0.1)
        optimizer.add_param_group({"params": bias, "lr": 0.01})
        for epoch in range(2):
            for x, y in DataLoader(data, 5):
                optimizer.zero_grad()
                loss = ((x * weight).sum(1) * scale + bias - y).pow(2).mean() + 0.1 * weight.abs().sum()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_([weight, bias], 1.0)
                optimizer.step()
                print(f"{loss.item():.5f} {norm.item():.5f}")
            optimizer.add_param_group({"params": [scale]}) if epoch == 0 else None
        second = torch.optim.LBFGS([weight], max_iter=4)
        x, y = next(iter(DataLoader(data, 12)))

        def closure():
            second.zero_grad()
            loss = ((x * weight).sum(1) - y).pow(2).mean()
            loss.backward()
            return loss

        second.step(closure)
        print([f"{value:.4f}" for value in (*weight.tolist(), bias.item(), scale.item())])
        """
    as_python(flow, source)
