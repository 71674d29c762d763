"""Each rank reads its own rows of sharded tensors only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

import duoka
from duoka.checkpoint.formats.safetensors import TensorFile
from duoka.checkpoint.rows import is_sharded
from tests.run.ranks import on_ranks

SHAPES = ((71, 50), (2, 95), (1, 2, 113), (41, 3, 20), (1,))
SMALL = 16_384  # bytes: at least headers, random states and what is whole, and far less than the tensors


class Net(nn.Module):
    """Parameters that are sharded along several dimensions, one that stays whole, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.epoch = 0

    def get_extra_state(self) -> int:
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        self.epoch = state


def bytes_read() -> list[int]:
    """Return a list to which the size of each read of this process will be added."""
    sizes: list[int] = []
    read = TensorFile.read_into

    def counted(self: TensorFile, start: int, memory: memoryview) -> None:
        sizes.append(len(memory))
        read(self, start, memory)

    TensorFile.read_into = counted  # type: ignore[method-assign]
    return sizes


def held(tensors: Any) -> int:
    """Return the bytes that this rank holds of tensors."""
    return sum((it.to_local() if is_sharded(it) else it).nbytes for it in tensors)


def listed(tensors: Any) -> list[Any]:
    return [(it.full_tensor() if is_sharded(it) else it).tolist() for it in tensors]


@pytest.mark.parametrize("on_meta", [False, True])
def test_weights(on_meta: bool, tmp_path: Path) -> None:
    model = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in SHAPES)
    duoka.save_weights(model, tmp_path / "net.safetensors")
    expected = [value.float().tolist() for value in model]

    def work(run: duoka.Run) -> Any:
        with torch.device("meta" if on_meta else "cpu"):
            other = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        run.model(other, strategy="fsdp")
        sizes = bytes_read()
        duoka.load_weights(other, tmp_path / "net.safetensors")
        return listed(other), sum(sizes[3:]) - 2 * held(other)  # the first three are the header; float64 in the file

    assert on_ranks(3, work) == [(expected, 0)] * 3


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_checkpoints(strategy: str, tmp_path: Path) -> None:
    def states(run: duoka.Run, strategy: str) -> tuple[Net, torch.optim.Optimizer, duoka.Checkpoint]:
        torch.manual_seed(run.world_size)
        model = run.model(Net(), strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, run.checkpoint(tmp_path, model=model, optimizer=optimizer)

    def tensors(model: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [
            *model.parameters(),
            *(it[name] for it in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")),
        ]

    def save(run: duoka.Run) -> list[Any]:
        model, optimizer, saved = states(run, strategy)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * parameter.detach()
        optimizer.step()
        model.epoch = 3
        saved.save()
        saved.wait()
        return listed(tensors(model, optimizer))

    def restore(run: duoka.Run) -> Any:
        model, optimizer, saved = states(run, "fsdp")
        sizes = bytes_read()
        saved.restore()
        found = tensors(model, optimizer)
        return listed(found), model.epoch, sum(sizes), held(found)

    expected = on_ranks(2, save)[0]
    for found, epoch, read, own in on_ranks(3, restore):
        assert (found, epoch) == (expected, 3)
        assert own <= read < own + SMALL


def test_load_model_of_safetensors_gathers_nothing(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
        model[1].weight = model[0].weight  # type: ignore[assignment]
        return model

    expected = tied()
    save_model(expected, tmp_path / "net.safetensors")

    def work(run: duoka.Run) -> Any:
        model, other = (run.model(it, strategy="fsdp") for it in (tied(), nn.Linear(4, 9)))
        before = run._session.ranks.begun
        with pytest.raises(RuntimeError, match="loading state_dict for Linear"):
            safetensors.torch.load_model(other, tmp_path / "net.safetensors")
        safetensors.torch.load_model(model, tmp_path / "net.safetensors", device="cuda")  # where only rows go
        begun = run._session.ranks.begun - before
        return listed([model[1].weight]), begun

    assert on_ranks(2, work) == [(listed([expected[0].weight]), 0)] * 2
