from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_gradients_however_they_are_asked_for(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        x, y = next(iter(DataLoader(TensorDataset(torch.randn(7, 3), torch.randn(7, 2)), 7)))
        model = nn.Linear(3, 2)
        parameters = list(model.parameters())

        def loss():
            return (model(x).tanh() - y).pow(2).mean()

        def show(name, grads):
            print(name, [None if g is None else f"{g.double().sum().item():.5f}" for g in grads])

        show("grad", torch.autograd.grad(loss(), parameters))
        show("one", torch.autograd.grad(loss(), model.weight))
        first = torch.autograd.grad(loss(), parameters, create_graph=True)
        show("penalty", torch.autograd.grad(sum((g ** 2).sum() for g in first), parameters))
        first = torch.autograd.grad(loss(), parameters, create_graph=True)
        (loss() + sum((g ** 2).sum() for g in first)).backward()
        show("backward of a penalty", [p.grad for p in parameters])
        other = torch.ones(1, requires_grad=True)
        show("unused", torch.autograd.grad(loss(), [*parameters, other], allow_unused=True))
        wanted = x.clone().requires_grad_()
        show("of the batch", torch.autograd.grad(model(wanted).sum(), [wanted, model.weight]))
        for p in parameters:
            p.grad = None
        torch.autograd.backward([loss(), 2 * loss()])
        loss().backward(inputs=[model.weight])
        (3 * loss()).backward(torch.tensor(0.5))
        model(x).backward(torch.ones(7, 2))
        torch.autograd.backward([model(x), loss()], [torch.rand(7, 2), None])
        torch.autograd.backward(model(x), y, inputs=list(model.parameters()))
        torch.autograd.backward(tensors=model(x), grad_tensors=y)
        show("sums", [p.grad for p in parameters])
        """
    as_python(flow, source)


@pytest.mark.parametrize("options", [[], ["--strategy", "exact"]], ids=["ddp", "exact"])
def test_gradients_under_a_mode_of_torch_functions(flow: Flow, options: list[str]) -> None:
    """Torch looks functions up anew there, and finds what scripts are given."""
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        data = TensorDataset(torch.randn(7, 4), torch.randint(0, 2, (7,)))
        x, y = next(iter(DataLoader(data, 7)))

        def step():
            rows, weight = x.clone().requires_grad_(), net[0].weight
            loss = F.cross_entropy(net(rows), y)
            (g,) = torch.autograd.grad(loss, rows, create_graph=True)
            (w,) = torch.autograd.grad(loss, weight, create_graph=True)
            (loss + g.pow(2).sum()).backward()
            print(*[f"{value.norm().item():.4f}" for value in [loss, g, w, rows.grad, weight.grad]])
            net.zero_grad()

        with torch.device("cpu"):
            step()
        torch.set_default_device("cpu")
        step()
        """
    as_python(flow, source, *options)


@pytest.mark.parametrize("options", [(), ("--strategy", "exact")])
def test_inputs_of_backward_by_position(flow: Flow, options: tuple[str, ...]) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for x in DataLoader(torch.randn(16, 3), batch_size=8):
            torch.autograd.backward(net(x).square().mean(), None, None, False, None, [net[1].weight])
            x.requires_grad_()
            torch.autograd.backward(net(x).square().mean(), None, None, False, None, [x])
            net(x).backward(torch.ones(8, 2), None, False, [x])
            print(x.grad.norm().item())
        print(net[0].weight.grad, net[1].weight.grad.norm().item())
        """
    as_python(flow, source, *options)
