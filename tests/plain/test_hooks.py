from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.fuzz.compare import difference
from tests.fuzz.known import on
from tests.fuzz.ranks import Ranks
from tests.plain.said import as_python, said

START = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # the printed digits do not depend on how a processor rounds
    data = TensorDataset(torch.randn(7, 3), torch.randn(7, 2))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = next(iter(DataLoader(data, 7)))

    def show(name, tensor):
        print(name, tuple(tensor.shape), f"{tensor.double().abs().sum().item():.4f}")
"""


def test_hooks_on_tensors_see_and_change_whole_gradients(flow: Flow) -> None:
    source = (
        START
        + """
    weight = model[0].weight
    handle = weight.register_hook(lambda grad: show("leaf", grad))
    model[2].weight.register_hook(lambda grad: grad * 10)
    hidden = model[:2](x)
    hidden.register_hook(lambda grad: show("hidden", grad))
    hidden.register_hook(lambda grad: grad * 2)
    loss = (model[2](hidden) - y).pow(2).mean()
    loss.register_hook(lambda grad: show("loss", grad))
    loss.backward()
    for name, parameter in model.named_parameters():
        show(name, parameter.grad)
    handle.remove()
    (model(x) - y).pow(2).mean().backward()
    show("again", weight.grad)
    """
    )
    as_python(flow, source)


@pytest.mark.parametrize("strategy", ["ddp", "exact", "fsdp"])
def test_hooks_on_parameters_record_no_gradients(strategy: str, flow: Flow) -> None:
    source = (
        START
        + """
    weight = model[0].weight
    weight.register_hook(lambda grad: (print(torch.is_grad_enabled()), grad * weight)[1])
    for _ in range(2):
        model(x).sum().backward()
        print(weight.grad.requires_grad, f"{weight.grad.sum().item():.6f}")
    grad, = torch.autograd.grad(model(x).sum(), weight)
    print(grad.requires_grad)
    grad, = torch.autograd.grad(model(x).sum(), weight, create_graph=True)
    print(grad.requires_grad)
    """
    )
    as_python(flow, source, "--strategy", strategy, *(["--shares", "2"] if strategy == "exact" else []))


def test_a_hook_is_called_without_a_gradient(flow: Flow) -> None:
    source = (
        START
        + """
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w.t()
        @staticmethod
        def backward(ctx, gradient):
            return gradient.sum(1, keepdim=True).expand(-1, 3), None

    weight = model[0].weight
    weight.register_hook(lambda grad: print("hook", grad))
    Silent.apply(x * model[0].bias[:3], weight).sum().backward()
    print(weight.grad)
    show("bias", model[0].bias.grad)
    """
    )
    as_python(flow, source)


def test_hooks_on_modules_see_whole_batches(flow: Flow) -> None:
    source = (
        START
        + """
    model[0].register_forward_pre_hook(lambda module, args: show("pre", args[0]))
    model[0].register_forward_hook(lambda module, args, out: show("forward", out))
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    show("weight", model[0].weight.grad)
    """
    )
    as_python(flow, source)


def test_backward_hooks_on_modules_see_whole_batches(flow: Flow) -> None:
    source = (
        START
        + """
    model[2].register_full_backward_hook(lambda module, into, out: show("backward", out[0]))
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    show("weight", model[0].weight.grad)
    """
    )
    as_python(flow, source)


OPTIMIZER_IN_BACKWARD = """
    optimizers = {p: torch.optim.Adam([p], lr=0.05, foreach=False) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    extra = torch.zeros(1, requires_grad=True)
    extra.register_post_accumulate_grad_hook(lambda p: show("extra", p.grad))
    for rows in (7, 7, 7, 2, 7):
        loss = (model(x[:rows]) - y[:rows] + extra).pow(2).mean()
        loss.backward()
        show("loss", loss)
        show("weight", model[0].weight)
    handles[0].remove()
    (model(x) - y).pow(2).mean().backward()
    show("grads", torch.tensor([p.grad is None for p in model.parameters()]))
"""


@pytest.mark.parametrize("strategy", ["ddp", "exact", "fsdp"])
def test_an_optimizer_may_step_in_the_backward_pass(strategy: str, flow: Flow) -> None:
    as_python(flow, START + OPTIMIZER_IN_BACKWARD, "--strategy", strategy)


AFTER_ACCUMULATION = """
    def step(p):
        calls.append(p.grad.abs().sum().item())
        p -= 0.05 * p.grad  # without no_grad: a backward pass records no operations
        p.grad = None

    for rows in (1, 7):  # whole batches that meet no optimizer and no split batch
        calls = []
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for a, b in DataLoader(data, rows):
            (net(a) - b).pow(2).mean().backward()
        show(f"{len(calls)} calls", torch.tensor(calls))
        net[2].weight.pow(2).sum().backward()
        (net(a) - b).pow(2).mean().backward(inputs=iter([net[0].weight, net[2].bias]))
        show(f"{len(calls)} calls", torch.tensor(calls))
"""


@pytest.mark.parametrize("strategy", ["ddp", "exact", "fsdp"])
def test_hooks_after_accumulation_are_called_when_one_device_calls_them(strategy: str, flow: Flow) -> None:
    as_python(flow, START + AFTER_ACCUMULATION, "--strategy", strategy)


def test_one_device_may_do_all_of_it(flow: Flow) -> None:
    source = (
        START
        + """
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: show("after", weight.grad))
    model(x).sum().backward()
    """
    )
    assert len(said(flow, source, workers=1)) == 1


def test_under_exact_hooks_change_whole_gradients_of_what_is_no_batch(flow: Flow) -> None:
    """Seven rows are fewer than the shares, and so every rank has them all."""
    source = (
        START
        + """
    w, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def show_and_scale(grad):
        show("hook", grad)
        return grad * 2

    for rows in (7, 16):
        x = next(iter(DataLoader(torch.randn(16, 3), rows)))
        square = torch.diag(w)
        square.register_hook(show_and_scale)
        h = nn.functional.linear(x, square, b)
        if rows == 7:
            h.register_hook(show_and_scale)
            h.retain_grad()
        loss = (h * torch.arange(3)).pow(2).sum()
        loss.register_hook(show_and_scale)
        loss.backward()
        if rows == 7:
            show("kept", h.grad)
        show("w", w.grad)
        show("b", b.grad)
    """
    )
    as_python(flow, source, "--strategy", "exact")


def test_under_exact_hooks_on_batches_are_called_once_with_whole_gradients(flow: Flow) -> None:
    source = (
        START
        + """
    w, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def show_and_scale(grad):
        show("hook", grad)
        return grad * 2

    for rows in (16, 11):
        x = next(iter(DataLoader(torch.randn(16, 3), rows)))
        h = nn.functional.linear(x, torch.diag(w), b).sin()
        h.retain_grad()
        h.register_hook(show_and_scale)
        handle = h.register_hook(lambda grad: grad + 1)
        h.register_hook(lambda grad: grad * 100).remove()
        (h * torch.arange(3)).pow(2).sum().backward()
        show("kept", h.grad)
        show("w", w.grad)
        show("b", b.grad)
    """
    )
    as_python(flow, source, "--strategy", "exact")


@pytest.mark.parametrize("devices", [2, 3])
def test_under_exact_hooks_run_when_one_device_runs_them(devices: int, flow: Flow) -> None:
    """And see the gradients that it has then, of weights, batches and both."""
    source = (
        START
        + """
    names = {name: parameter for name, parameter in model.named_parameters()}

    def seen(name):
        show(name, torch.stack([torch.zeros(()) if p.grad is None else p.grad.abs().sum() for p in names.values()]))

    for rows in (16, 2):
        x = next(iter(DataLoader(torch.randn(16, 3), rows)))
        handles = [p.register_hook(lambda grad, name=name: seen(name)) for name, p in names.items()]
        handles += [p.register_post_accumulate_grad_hook(lambda p: seen("after")) for p in names.values()]
        handles.append(torch.autograd.graph.register_multi_grad_hook(
            [*names.values()], lambda grads: show("all", torch.stack([grad.sum() for grad in grads]))
        ))
        hidden = model[:2](x)
        hidden.register_hook(lambda grad: seen("hidden"))
        torch.autograd.graph.register_multi_grad_hook([hidden, model[2].weight], lambda grads: show("two", grads[1]))
        (model[2](hidden).pow(2).mean() + model[0].weight.pow(2).sum()).backward()
        seen("end")
        for handle in handles:
            handle.remove()
    """
    )
    as_python(flow, source, "--strategy", "exact", workers=devices)


def test_under_exact_a_pass_within_another_one_gives_gradients_at_once() -> None:
    body = (
        "x = x / 16; h = net(x); h.register_hook(again); h.square().sum().backward(); show()",
        "Inner.apply(net(x)).square().sum().backward(); show()",
        "net(x).square().mean().backward(create_graph=True); show(); net.weight.grad.norm().backward(); show()",
        "net.weight.grad = net.bias.grad = None",
    )
    header = (
        "torch.manual_seed(0); net, other = nn.Linear(3, 3), nn.Linear(3, 3)",
        "def show(): print([weight.grad for weight in (*net.parameters(), *other.parameters())])",
        """def again(gradient):
    with torch.enable_grad():
        net(x * 2).square().sum().backward(); show()
        print(torch.autograd.grad(net(x).square().sum() + net.bias.norm(), [*net.parameters()]))""",
        """class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * 1
    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad(): other(ctx.saved_tensors[0].detach()).square().sum().backward()
        show()
        return gradient * 1""",
    )
    for size in (2, 3):
        ranks = Ranks(size, "exact")
        for rows in (6, 2):
            assert difference(on(f"({rows}, 3)", *body, header=header), ranks) is None
        ranks.close()
