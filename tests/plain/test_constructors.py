from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_what_is_made_of_a_batch_is_made_of_all_of_it(flow: Flow) -> None:
    source = """
        import copy, pickle, warnings
        import numpy as np, torch
        warnings.simplefilter("ignore")  # of tensors made of tensors
        from torch import nn
        from torch.autograd import Variable
        from torch.utils.data import DataLoader, TensorDataset

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x + x.mean()

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        def show(name, x):
            print(name, tuple(x.shape), f"{float(x.sum()):.4f}", isinstance(x, torch.Tensor))

        torch.manual_seed(0)
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(7, 3)), 7)))
        show("tensor", torch.tensor(x.mean(1)))
        show("list", torch.tensor([x.sum(), x.mean()]))
        show("as_tensor", torch.as_tensor(x))
        show("asarray", torch.asarray(x))
        show("as_tensor of another type", torch.as_tensor(x, dtype=torch.float64))
        show("asarray of another type", torch.asarray(x > 0, dtype=torch.float64, device="cpu"))
        print(torch.as_tensor(x) is x, torch.as_tensor(x, dtype=torch.int8).dtype)
        show("from_numpy", torch.from_numpy(x.numpy()))
        show("np.array", torch.from_numpy(np.array(x)))
        show("np.asarray", torch.from_numpy(np.asarray(x)))
        show("np.mean", torch.tensor(np.mean(x.numpy(), 0)))
        show("new_tensor", x.new_tensor([1.0, 2.0]))
        show("new_tensor of a batch", torch.zeros(1).new_tensor(x))
        show("new_zeros", x.new_zeros(x.shape))
        show("Variable", Variable(x))
        wanted = Variable(x, requires_grad=True)
        (wanted ** 2).sum().backward()
        show("grad", wanted.grad)
        print(isinstance(x, Variable), isinstance(3, Variable))
        weight = nn.Parameter(x)
        (weight ** 2).sum().backward()
        show("Parameter", weight.grad)
        leaf = x.clone().requires_grad_()
        Double.apply(leaf).pow(2).sum().backward()
        show("Function", leaf.grad)
        show("l1", torch.nn.functional.l1_loss(x, x.flip(1), weight=x.abs()))
        show("complex", torch.complex(x, x).abs())
        show("from a copy", pickle.loads(pickle.dumps(copy.deepcopy(x))))
        weight.data = x * 2
        weight.data = weight.data + x
        show("data", weight.data)
        shared = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
        shared.mul_(2)
        show("dlpack", x)
        show("FloatTensor", torch.FloatTensor(x.tolist()))
        print([f"{value:.3f}" for value in x[0]], f"{x.sum():.3f}", 3 in x, len(list(x)))
        """
    as_python(flow, source)


def test_a_batch_as_a_subclass_is_all_of_it(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        class Named(torch.Tensor):
            def twice(self):
                return self * 2

        torch.manual_seed(0)
        x, y = torch.randn(2, 22, 4).unbind()
        weight, model = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 4)
        optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.1)
        for x, y in DataLoader(TensorDataset(x, y), batch_size=8):
            named = torch.Tensor.as_subclass(x, Named)
            named.mul_(2)
            x.add_(1)
            print(type(named).__name__, tuple(named.shape), f"{x.sum():.3f} {named.twice().mean().item():.3f}")
            scale = (weight * 2).tanh().as_subclass(Named)
            for _ in range(40):
                scale = scale * 1.01
            hidden = F.linear(x, scale) + torch.einsum("nc,kc->nk", x, scale) * scale[:, 0]
            out = model(hidden.as_subclass(torch.Tensor))
            loss = F.mse_loss(out.as_subclass(Named), y) + F.l1_loss(y, out) + named.mean() * weight.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.3f} {weight.grad.norm().item():.3f} {model.weight.grad.norm().item():.3f}")
        """
    as_python(flow, source)


def test_a_function_may_call_modules_in_both_passes(flow: Flow) -> None:
    """As the adjoint method for ordinary differential equations does."""
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        change = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

        class Step(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *parameters):
                with torch.no_grad():
                    out = x + 0.1 * change(x)
                ctx.save_for_backward(x)
                return out

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    out = x + 0.1 * change(x)
                    return torch.autograd.grad(out, [x, *change.parameters()], grad)

        optimizer = torch.optim.SGD(change.parameters(), lr=0.5)
        for (x,) in DataLoader(TensorDataset(torch.randn(19, 2)), batch_size=8):
            loss = (Step.apply(Step.apply(x, *change.parameters()), *change.parameters()) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.4f}")
        """
    as_python(flow, source)


def test_devices_that_are_the_default_are_those_of_the_script_s_tensors_alone(flow: Flow) -> None:
    source = """
        import os, time, torch
        from torch import nn
        with torch.device("meta"):
            os.makedirs("made", exist_ok=True)
            with open("made/file", "w") as file:
                file.write("text")
            print(open("made/file").read(), time.time() > 0, os.path.exists("made"))
            print(torch.tensor([]).device, torch.tensor(3.0).device, torch.as_tensor([1]).device)
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            print(torch.get_default_device(), {value.device for value in model.state_dict().values()})
        model = model.to_empty(device="cpu")
        print(model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}))
        print(model(torch.arange(6.0).view(3, 2)).detach())
        torch.set_default_device("meta")
        print(torch.tensor(1).device, os.listdir("made"))
        """
    as_python(flow, source)
