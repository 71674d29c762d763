"""Blocks are gathered ahead of time within their bound, and gradients that travel meanwhile arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from duoka.collectives.process import ProcessCollectives
from duoka.errors import Refused
from duoka.sharding.block import Block
from duoka.sharding.blocks import Blocks
from duoka.strategies.fsdp import ModelSharding
from tests.view.processes import all_well, in_processes

LAYERS = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


def sharded(ranks: ProcessCollectives, model: nn.Module) -> ModelSharding:
    sharding = ModelSharding(ranks, lambda leaf: None, lambda parameter: None)
    sharding.shard(model)
    return sharding


def step(model: nn.Module, sharding: ModelSharding, *, write: bool = True) -> None:
    with sharding.deferring():
        model(inputs()).square().sum().backward()
    if write:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    model.zero_grad()


def on_two(work: Callable[[ProcessCollectives], Any]) -> list[Any]:
    return all_well(in_processes(2, work, nearby=True))


class Observed(Blocks):
    """Counts what is started, and notes the most that is whole or on its way."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks.view)
        self.started = self.background = self.most = 0
        ranks = blocks.view.ranks
        start, background = ranks.start_all_gather, ranks.in_background

        def start_all_gather(tensor: Tensor) -> Any:
            self.started += 1
            return start(tensor)

        def in_background(wait: Any, count: int = 1) -> Any:
            self.background += 1
            return background(wait, count)

        ranks.start_all_gather, ranks.in_background = start_all_gather, in_background  # type: ignore[method-assign]

    def use(self, block: Block) -> None:
        super().use(block)
        coming = [] if self._prefetch is None else [self._prefetch.reference()]
        self.most = max(self.most, sum(one.size() for one in [*self._unsharded, *coming] if one is not None))


def test_the_next_block_comes_while_one_computes() -> None:
    def work(ranks: ProcessCollectives) -> Any:
        sharding = ModelSharding(ranks, lambda leaf: None, lambda parameter: None)
        seen = sharding._blocks = Observed(sharding._blocks)
        model = net()
        sharding.shard(model)
        found = []
        for _ in range(4):
            before = seen.started, seen.background
            step(model, sharding)
            found.append((seen.started - before[0], seen.background - before[1]))
        return found, seen.most, model[0][0].weight._block.size()

    for found, most, size in on_two(work):
        gathered = found[0][0]
        assert gathered == 2 * LAYERS - 3  # two stay for the backward pass, which needs no weights of the first
        # The first of a step comes when it is needed, as parameters were written to.
        assert found[2:] == [(gathered, gathered - 1)] * 2
        assert most == 2 * size


def test_gradients_are_those_of_one_device() -> None:
    plain = net()
    plain(inputs()).square().sum().backward()
    plain(inputs()).square().sum().backward()
    expected = [parameter.grad for parameter in plain.parameters()]

    def work(ranks: ProcessCollectives) -> Any:
        model = net()
        sharding = sharded(ranks, model)
        first, *_, last = model.parameters()
        seen = []
        hook = model[2].register_full_backward_hook(lambda *_: seen.append(model[4][0].bias.grad.full_tensor()))
        model[1][0].bias.register_hook(lambda grad: 3 * grad)
        for _ in range(2):
            with sharding.deferring():
                model(inputs()).square().sum().backward()
        found = [parameter.grad.full_tensor() for parameter in model.parameters()]
        hook.remove()
        model.zero_grad()
        with sharding.deferring():
            model(inputs()).square().sum().backward(inputs=[first._rows])
        alone = [parameter.grad is not None for parameter in model.parameters()]
        with sharding.deferring():  # as within a backward pass
            (asked,) = torch.autograd.grad(model(inputs()).square().sum(), last._rows)
        return found, seen[1], alone, last.grad is None, asked

    for rank, (found, seen, alone, untouched, asked) in enumerate(on_two(work)):
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(one, 3 * other if place == 3 else other)
        torch.testing.assert_close(seen, expected[-1])  # was there when the hook read it
        assert alone == [True] + [False] * (2 * LAYERS - 1)
        assert untouched
        torch.testing.assert_close(asked, expected[-1][3 * rank : 3 * rank + 3] / 2)


def test_a_view_that_outlives_its_block_is_written_to() -> None:
    def work(model: nn.Module, released: Callable[[], object] = lambda: None) -> list[Tensor]:
        view = model[0][0].weight.t()
        model(inputs())
        released()
        with torch.no_grad():
            view.mul_(3)
        out = [model(inputs())]
        with torch.no_grad():
            view[0] = 1
        return [*out, model(inputs()), model[0][0].weight.norm()]

    def on_rank(ranks: ProcessCollectives) -> Any:
        model = net()
        views = sharded(ranks, model)._blocks.views
        counted: list[int] = []
        found = work(model, lambda: counted.append(len(views.memory)))
        model(inputs())  # the view is gone
        return found, counted, len(views.memory)

    expected = work(net())
    for found, counted, left in on_two(on_rank):
        torch.testing.assert_close(found, [one.detach() for one in expected])
        assert (counted, left) == ([1], 0)


def test_what_autocast_casts_is_released_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = Block.operands
    storages: list[StorageWeakRef] = []

    def seen(block: Block, wanted: Sequence[tuple[int, torch.dtype | None]]) -> list[Tensor]:
        tensors = operands(block, wanted)
        cast = [tensor for tensor in tensors if tensor.dtype is torch.bfloat16]
        storages.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in cast)
        return tensors

    monkeypatch.setattr(Block, "operands", seen)

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs()).float().square().sum()

    plain = net()
    loss(plain).backward()

    def work(ranks: ProcessCollectives) -> Any:
        model = net()
        sharding = sharded(ranks, model)
        with sharding.deferring():
            found = loss(model)
            alive = {storage.cdata for storage in storages if not storage.expired()}
            found.backward()
        return len(alive), [parameter.grad.full_tensor() for parameter in model.parameters()]

    for alive, grads in on_two(work):
        assert alive <= 3  # two blocks, and one that is on its way
        for found, parameter in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_a_model_whose_first_call_is_in_inference_mode_is_trained() -> None:
    def work(ranks: ProcessCollectives) -> Any:
        model = net()
        with torch.inference_mode():
            sharding = sharded(ranks, model)
            model(inputs())
        step(model, sharding)
        return model(inputs()).sum().item()

    plain = net()
    plain(inputs()).square().sum().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    assert on_two(work) == pytest.approx([plain(inputs()).sum().item()] * 2, rel=1e-5)


def test_a_model_that_one_rank_deletes_earlier() -> None:
    def work(ranks: ProcessCollectives) -> Any:
        model, other = net(), net()
        sharding = sharded(ranks, model)
        sharding.shard(other)
        for _ in range(3):  # blocks of one follow those of the other
            step(model, sharding, write=False)
            step(other, sharding, write=False)
        kept = [other] if ranks.rank else []
        del other
        for _ in range(3):
            step(model, sharding, write=False)
        return len(kept), model(inputs()).sum().item()

    (_, one), (_, two) = on_two(work)
    assert one == two == pytest.approx(net()(inputs()).sum().item())


def test_a_gradient_of_which_a_pass_has_added_an_unknown_part_is_refused() -> None:
    def work(ranks: ProcessCollectives) -> None:
        model = net()
        sharding = sharded(ranks, model)
        model(inputs()).sum().backward()
        hidden = model[:2](inputs())
        out = model[2:](hidden).sum()
        hidden.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"), sharding.deferring():
            out.backward()
        weight, other = model[0][0].weight, model[4][0].weight
        with pytest.raises(Refused, match="failed"):
            print(weight.grad)
        weight.grad = None
        assert weight.grad is None
        model.zero_grad()
        assert other.grad is None

    on_two(work)


def test_a_change_of_shape_in_place_is_refused() -> None:
    def work(ranks: ProcessCollectives) -> None:
        model = net()
        sharded(ranks, model)
        weight = model[0][0].weight
        with torch.no_grad(), pytest.raises(Refused, match="shape of a sharded parameter in place"):
            weight.unsqueeze_(0)
        assert weight.shape == (6, 6)

    on_two(work)


def test_a_frozen_parameter_that_would_need_a_gradient_is_refused() -> None:
    def work(ranks: ProcessCollectives) -> None:
        model, average = net(), net().requires_grad_(False)
        sharded(ranks, model).shard(average)
        weight, mean = model[0][0].weight, average[0][0].weight
        with pytest.raises(Refused, match="no_grad"):
            mean.lerp_(weight, 0.1)
        with torch.no_grad():
            mean.lerp_(weight, 0.1)
        mean.lerp_(weight.detach(), 0.1)

    on_two(work)


def test_a_pass_that_needs_the_data_before_it_was_set_is_refused() -> None:
    def work(ranks: ProcessCollectives) -> str:
        model = net()
        sharding = sharded(ranks, model)
        loss = model(inputs()).sum()
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        with pytest.raises(Refused) as error, sharding.deferring():
            loss.backward()
        return str(error.value)

    assert all("as it was before the script set its `data`" in text for text in on_two(work))
