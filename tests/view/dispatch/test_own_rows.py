from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.view.dispatch.own_rows import compute_opaque, on_own_rows
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.flows.flow import Flow
from tests.plain.said import as_python, run
from tests.view.ranks import on_ranks, shared, whole_of


def opaque(x: Tensor, weight: Tensor, flag: bool = True) -> tuple[Tensor, str]:
    """No rule knows it."""
    assert flag
    return (x * weight).cumsum(1), "else"


def whole() -> Tensor:
    return torch.arange(15.0).view(5, 3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_named_gets_own_rows_and_gives_batches(world_size: int) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    opaque(whole(), weight)[0].square().mean().backward()
    assert weight.grad is not None

    def on_rank(view: View) -> tuple[Any, str, int, Tensor]:
        view.set_row_independent(["opaque", "other"])
        own = weight.detach().clone().requires_grad_()
        calls: list[int] = []

        def counted(x: Tensor, *args: Any) -> Any:
            calls.append(len(x))
            return opaque(x, *args)

        out, rest = compute_opaque(["opaque"], counted, (shared(view, whole()), own), {})
        assert type(out) is BatchTensor
        assert view.row_independent.unused == {"other"}
        out.square().mean().backward()
        assert own.grad is not None
        return whole_of(out), rest, calls[0], view.ranks.all_reduce(own.grad.clone()) / world_size

    rows = []
    for found, rest, count, grad in on_ranks(world_size, on_rank):
        torch.testing.assert_close(found, opaque(whole(), weight.detach())[0])
        torch.testing.assert_close(grad, weight.grad)
        assert rest == "else"
        rows.append(count)
    assert sum(rows) == 5


def test_what_is_not_named_gets_all_rows() -> None:
    def on_rank(view: View) -> Any:
        view.set_row_independent(["other"])
        return compute_opaque(["opaque"], lambda x: (len(x), x.sum(0)), (shared(view, whole()),), {})

    for count, total in on_ranks(2, on_rank):
        assert count == 5
        torch.testing.assert_close(total, whole().sum(0))


def test_what_is_written_in_place_stays_the_same_batch() -> None:
    def on_rank(view: View) -> Any:
        x = shared(view, whole())
        assert on_own_rows("double", lambda rows: rows.mul_(2), (x,), {}) is x
        return whole_of(x)

    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, 2 * whole())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.mean(), "gave a tensor of shape"),
        (lambda x: x.repeat(1, 2).t(), "does not hold them"),
        (lambda x: x * torch.rand_like(x), "draws random numbers"),
        (lambda x: nn.functional.dropout(x), "draws random numbers"),
    ],
)
def test_what_cannot_be_of_rows_is_refused(function: Any, why: str) -> None:
    def on_rank(view: View) -> None:
        with pytest.raises(Refused, match=why):
            on_own_rows("Scan", function, (shared(view, whole()),), {})

    on_ranks(2, on_rank)


def test_batches_of_other_samples_are_refused() -> None:
    def on_rank(view: View) -> None:
        x, other = shared(view, whole()), shared(view, torch.zeros(7, 3))
        with pytest.raises(Refused, match="the same samples"):
            on_own_rows("Scan", lambda one, two: one, (x, other), {})
        with pytest.raises(Refused, match="the same samples"):
            on_own_rows("Scan", lambda one, two: one, (x, shared(view, torch.zeros(3, 5), 1)), {})

    on_ranks(2, on_rank)


SOURCE = """
    import warnings
    warnings.simplefilter("ignore")  # newer versions of torch give one for TorchScript
    import torch
    from torch import nn

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.cumsum(1) * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return (grad * w).flip(1).cumsum(1).flip(1), (grad * x.cumsum(1)).sum(0)

    @torch.library.custom_op("mylib::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    @torch.jit.script
    def curve(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + x.sin()

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return torch.relu(self.linear(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
            self.w = nn.Parameter(torch.ones(6))
            self.part = torch.jit.script(Part())

        def forward(self, x):
            a = Scan.apply(self.first(x), self.w)
            b = square(self.first(x)) * 0.1
            c = curve(self.first(x))
            return self.last(a + b + c + self.part(self.first(x)))

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    for start in range(0, 40, 10):
        loss = (net(x[start:start + 10]) - y[start:start + 10]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f} {net.w.sum().item():.4f} {net.part.linear.weight.grad.abs().sum():.4f}")
"""
NAMES = "Scan,mylib::square,curve,Part"


def test_functions_of_every_kind_are_shared_out_where_the_user_names_them(flow: Flow) -> None:
    as_python(flow, SOURCE, workers=3)
    as_python(flow, SOURCE, "--row-independent", NAMES, workers=3)
    source = flow.folder / "script.py"
    without = flow.run(["run", "--verbose", "--devices", "cpu:2", source]).ok().stderr
    for name in ("Scan", "mylib::square", "curve", "Part"):
        assert f"computed whole by every rank: {name} at script.py" in without
    vouched = flow.run(["run", "--verbose", "--devices", "cpu:2", "--row-independent", NAMES, source]).ok().stderr
    assert "computed whole" not in vouched
    assert "on own rows Scan, mylib::square, curve, Part, as --row-independent says" in vouched


def test_exact_gives_the_same_bits_on_any_number_of_devices(flow: Flow) -> None:
    one, two = (
        run(flow, SOURCE, "--strategy", "exact", "--row-independent", NAMES, workers=workers).ok().stdout
        for workers in (1, 2)
    )
    assert one == two


def test_a_name_that_nothing_has_is_told(flow: Flow) -> None:
    source = "import torch\nx = torch.nn.Linear(2, 2)(torch.ones(4, 2))\n"
    found = flow.run(["run", "--devices", "cpu:2", "--row-independent", "Skan", flow.write("s.py", source)]).ok()
    assert "--row-independent Skan had no effect: no function of this name was called with a batch" in found.stderr


def test_no_name_is_refused(flow: Flow) -> None:
    found = flow.run(["run", "--devices", "cpu:2", "--row-independent", "a b", flow.write("s.py", "")])
    assert "names like Scan, train.Scan or mylib::square, but is 'a b'" in found.stderr
