"""Parameters that backward passes leave out are named; options of DistributedDataParallel with these names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import duoka
from tests.run.ranks import on_ranks


class Heads(nn.Module):
    """Two heads, of which one call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1, bias=False)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x))  # type: ignore[no-any-return]


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def passes(run: duoka.Run, heads: list[int], **how: Any) -> nn.Module:
    model = run.model(Heads(), **how)
    for head in heads:
        (x,) = next(iter(run.loader((X,), batch_size=6)))
        model(x, head).sum().backward()
    return model


def test_what_is_left_out_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, lambda run: passes(run, [0, 0, 0, 1]) and None)
    lines = [line for line in capfd.readouterr().err.splitlines() if "no gradient" in line]
    assert len(lines) == 1
    assert lines[0].startswith("duoka: Heads: no gradient at test_backward.py:")
    assert "for heads.1 (Linear): weight (find_unused_parameters=True if so meant)" in lines[0]


@pytest.mark.parametrize("how", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_nothing_is_told_where_there_is_nothing_to_tell(
    how: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def work(run: duoka.Run) -> None:
        passes(run, [0, 1] if "find_unused_parameters" in how else [], **how)
        two = run.model(nn.Linear(4, 1)), run.model(nn.Linear(4, 1))
        for model in two:  # a pass that does not reach a model leaves out nothing of it
            model(X).sum().backward()

    on_ranks(2, work)
    assert "no gradient" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "heads", "text"),
    [
        ({"find_unused_parameters": False}, [1], r"heads\.0 \(Linear\): weight, bias; but find_unused_param"),
        ({"static_graph": True, "find_unused_parameters": True}, [0, 1], r"heads\.0 .*: weight, bias; heads\.1"),
    ],
    ids=["unused", "static"],
)
def test_what_must_not_be_left_out(how: dict[str, Any], heads: list[int], text: str) -> None:
    def work(run: duoka.Run) -> Any:
        with pytest.raises(duoka.Refused, match=text):
            passes(run, heads, **how)
        return run.all_sum(1)

    assert on_ranks(2, work) == [2, 2]


def test_gradients_may_be_views() -> None:
    def work(run: duoka.Run) -> Any:
        found = []
        for views in (False, True):
            torch.manual_seed(0)
            model = run.model(nn.Linear(4, 3), gradient_as_bucket_view=views)
            for number, (x,) in enumerate(run.loader((X,), batch_size=3)):
                model(x).square().sum().backward()
                if number == 0:
                    first = [p.grad.clone() for p in model.parameters()]
                    model.zero_grad(set_to_none=False)
            found.append([*first, *(p.grad.clone() for p in model.parameters())])
        shared = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True)), len(shared)

    assert on_ranks(2, work) == [(True, 1)] * 2


@pytest.mark.parametrize(
    ("how", "norm", "same"),
    [({}, "whole", True), ({}, "local", True), ({"broadcast_buffers": False}, "local", False)],
    ids=["whole", "local", "not asked for"],
)
def test_buffers_are_the_same_on_all_ranks(how: dict[str, Any], norm: Any, same: bool) -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), **how)
        for (x,) in run.loader((X,), batch_size=6):
            model(x).square().sum().backward()
        return [buffer.tolist() for buffer in model.buffers()]

    one, other = on_ranks(2, work, batch_norm=norm)
    assert (one == other) is same
    assert one[2] == 1


def test_buffers_that_ranks_compute_by_themselves() -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(nn.BatchNorm1d(4), broadcast_buffers=True)
        model(X + run.rank).sum().backward()
        return model.running_mean.tolist()

    one, other = on_ranks(2, work)
    assert one == other


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph", "broadcast_buffers"])
def test_words_that_are_no_switches(name: str) -> None:
    with duoka.start(seed=0) as run, pytest.raises(duoka.OptionError, match=f"{name} must be True or False"):
        run.model(nn.Linear(2, 1), **{name: "yes"})  # type: ignore[arg-type]
