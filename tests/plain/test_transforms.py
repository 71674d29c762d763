from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_functions_made_of_functions_are_given_all_rows(flow: Flow) -> None:
    source = """
        import functorch, torch, warnings
        from torch.autograd import forward_ad
        from torch import nn
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils.data import DataLoader, TensorDataset
        from torch.utils.flop_counter import FlopCounterMode
        from torch.utils._python_dispatch import TorchDispatchMode

        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 uses its own torch.jit, and warns of that

        def show(name, x):
            print(name, tuple(x.shape), f"{x.detach().double().sum().item():.4f}")

        @torch.compile(backend="eager")
        def decorated(x, scale=1.0):
            return (x * scale).sin().sum()

        torch.manual_seed(0)
        linear = nn.Linear(3, 2)
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(7, 3)), 7)))
        cube = lambda v: (v ** 3).sum()
        show("compiled", torch.compile(lambda v: (v * 2).sin().sum(), backend="eager")(x))
        show("decorated", decorated(x, scale=2.0))
        show("compiled, rows", torch.compile(torch.matmul, backend="eager")(x, linear.weight.t()))
        show("vmap", torch.vmap(lambda row: (row ** 2).sum())(x))
        show("vmap of two", torch.func.vmap(torch.dot)(x, x))
        show("vmap of a module", torch.func.vmap(linear)(x))
        show("cond", torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,)))
        show("grad", torch.func.grad(cube)(x))
        show("grad of each", torch.func.vmap(torch.func.grad(cube))(x))
        show("jacrev", torch.func.jacrev(lambda v: v.sin().sum(0))(x))
        show("jvp", torch.func.jvp(torch.sin, (x,), (x,))[1])
        show("vjp", torch.func.vjp(torch.sin, x)[1](x)[0])
        show("hessian", torch.func.hessian(cube)(x))
        show("functorch", functorch.vmap(functorch.grad(cube))(x))
        show("functionalize", torch.func.functionalize(lambda v: v.clone().view(-1).add_(1))(x))
        show("make_fx", make_fx(lambda v: v.sin().sum(0))(x)(torch.ones(7, 3)))
        show("functorch, vjp", functorch.vjp(torch.sin, x)[1](x)[0])
        show("jacobian", torch.autograd.functional.jacobian(lambda v: v.sin().sum(0), x))
        loss = decorated(x @ linear.weight.t()) + torch.vmap(linear)(x).pow(2).sum()
        loss.backward()
        show("weight", linear.weight.grad)
        show("Tensor", torch.Tensor(x))
        show("FloatTensor", torch.FloatTensor(x))
        show("DoubleTensor", torch.DoubleTensor(x.double()))
        parameters = {name: p.detach() for name, p in linear.named_parameters()}
        loss_of = lambda p, row: torch.func.functional_call(linear, p, (row,)).pow(2).sum()
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, x)
        show("each sample's gradients", each["weight"])

        def loss_with(p):
            return torch.func.functional_call(linear, p, (x,)).pow(2).mean()

        show("closure, grad", torch.func.grad(loss_with)(parameters)["weight"])
        show("closure, hessian", torch.func.hessian(loss_with)(parameters)["weight"]["bias"])
        show("closure, a row", torch.vmap(lambda w: (x[0] * w).sum() + x.mean())(torch.ones(2, 3)))
        with forward_ad.dual_level():
            show("dual rows", forward_ad.unpack_dual(linear(forward_ad.make_dual(x, x + 1))).tangent)
            tangents = {name: forward_ad.make_dual(p, p + 1) for name, p in parameters.items()}
            show("dual weights", forward_ad.unpack_dual(loss_with(tangents)).tangent)
        jacobian = torch.autograd.functional.jacobian
        show("jacobian, vectorized", jacobian(lambda v: v.sin().sum(1), x, vectorize=True))
        show("forward-mode", jacobian(lambda v: v.sin().sum(1), x, vectorize=True, strategy="forward-mode"))
        y = linear(x.requires_grad_())
        many = torch.stack([torch.ones(7, 2), y.detach()])
        for found in torch.autograd.grad(y, (x, linear.weight), many, is_grads_batched=True, retain_graph=True):
            show("batched", found)
        unused = torch.autograd.grad(y.mean(0), (x, torch.ones(1, requires_grad=True)), torch.eye(2),
                                     is_grads_batched=True, allow_unused=True)
        show("batched, unused", unused[0])
        print(unused[1])
        with FlopCounterMode(display=False) as counter:
            linear(x).sum().backward()
            linear(torch.ones(6, 3))
        print("flops", counter.get_total_flops())

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                print(func, [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)])
                return func(*args, **(kwargs or {}))

        with Names():
            y = x.detach() * 2
        places = torch.stack([torch.arange(7), torch.zeros(7).long()])
        show("sparse", torch.sparse_coo_tensor(places, values=y[:, 0], size=(7, 2), check_invariants=True).to_dense())
        show("traced", torch.jit.trace(linear, x)(x))
        """
    as_python(flow, source)


def test_a_module_whose_backward_pass_is_compiled_trains_as_on_one_device(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
        compiled = torch.compile(net, backend="aot_eager")
        optimizer = torch.optim.Adam(compiled.parameters(), 1e-2)
        x = torch.randn(52, 6)
        for epoch in range(2):
            for batch, target in DataLoader(TensorDataset(x, x[:, :2].sin()), 16):
                loss = nn.functional.mse_loss(compiled(batch), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"{loss.item():.4f} {net[0].weight.grad.abs().sum().item():.4f}")
    """
    as_python(flow, source)
