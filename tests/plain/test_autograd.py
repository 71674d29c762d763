from __future__ import annotations

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
