from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, run


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


def test_parameters_of_one_shape_may_come_as_a_set_whose_order_differs_between_ranks(flow: Flow) -> None:
    """Or as a list made of a set, as where some are taken out."""
    source = """
        import os
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        data = TensorDataset(torch.randn(12, 4), torch.randn(12, 4))
        apart = [torch.zeros(3) for _ in range(os.getpid() % 7)]  # no two processes have the same addresses
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        head, body = set(model[-1].parameters()), set(model.parameters())
        for optimizer in (torch.optim.Adam(body, lr=0.01), torch.optim.Adam(list(body - head), lr=0.01)):
            for x, y in DataLoader(data, 5):
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                loss.backward()
                optimizer.step()
                print(f"{loss.item():.5f}")
        print([f"{parameter.sum().item():.4f}" for parameter in model.parameters()])
        """
    as_python(flow, source, workers=3)


def test_a_set_of_tensors_that_no_module_has_is_refused(flow: Flow) -> None:
    source = """
        import torch
        torch.optim.SGD({torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)}, lr=0.1)
        """
    result = run(flow, source)
    assert result.returncode == 1
    assert "SGD was given a set with 2 tensors that no module has registered" in result.stderr
