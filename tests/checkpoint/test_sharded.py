"""Each rank writes its own rows of sharded tensors into one file, and reads its own rows only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import duoka
from duoka.checkpoint import sharded
from duoka.checkpoint.formats import is_sharded
from duoka.checkpoint.formats.safetensors import TensorFile, lay_out
from duoka.errors import WeightsError
from duoka.system import disk
from tests.checkpoint.runs import WORLD, apart, exchanges, full, net, trained
from tests.run.ranks import on_ranks

ODD_SHAPES = ((7, 5), (2, 9), (1, 2, 11), (4, 3, 2), (3,))


@pytest.mark.parametrize("world", [2, 3])
def test_rows_along_any_dimension_in_any_layout_are_at_their_place(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "BLOCK", 16)

    def work(run: duoka.Run) -> list[Tensor]:
        model = nn.Module()
        model.all = nn.ParameterList(torch.randn(shape) for shape in ODD_SHAPES)
        model.all[0].data = model.all[0].data.t().contiguous().t()
        whole = [parameter.detach().clone() for parameter in model.all]
        state = dict(run.model(model, strategy="fsdp").state_dict())
        assert {value._spec.dim for value in state.values() if is_sharded(value)} == (
            {0, 1} if world == 2 else {0, 1, 2}
        )
        duoka.save_weights(model, tmp_path / "net.safetensors")
        return whole

    expected = on_ranks(world, work)[0]
    found = load_file(tmp_path / "net.safetensors")
    assert [found[f"all.{number}"].tolist() for number in range(len(ODD_SHAPES))] == [it.tolist() for it in expected]


def test_ranks_share_files_if_all_are_on_one_machine_and_see_them(tmp_path: Path) -> None:
    (tmp_path / "here").touch()

    def work(run: duoka.Run) -> list[bool]:
        ranks: Any = run._session.ranks

        def seen(path: Path, writes: bool = True) -> bool:
            return sharded.share_files(ranks, path, writes)

        found = [seen(tmp_path / "here"), seen(tmp_path / ("here" if run.rank == 0 else "nowhere"))]
        found.append(seen(tmp_path / ("here" if run.rank == 0 else "nowhere"), writes=run.rank == 0))
        name = sharded.machine_name
        sharded.machine_name = lambda: f"machine {run.rank}"
        found.append(seen(tmp_path / "here"))
        sharded.machine_name = name
        return found

    assert on_ranks(2, work) == [[True, False, True, False]] * 2


FILES = {"one": ("net.safetensors", None), "several": ("net.safetensors", 200), "pickled": ("net.pth", 200)}


@pytest.mark.parametrize("together", [True, False])
def test_weights_are_the_files_that_one_device_writes(together: bool, tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        model, _ = trained(run)
        put, write, sent = disk.put, disk.write, exchanges()
        names: list[str] = []
        own: list[int] = []

        def puts(beside: Path, path: Path) -> None:
            names.append(path.name)
            put(beside, path)

        def counted(path: Path, data: Any) -> None:
            data = list(data)
            own.extend(len(part) for at, part in data if at)  # all but headers
            write(path, data)

        disk.put = puts
        if together:
            disk.write = counted
        else:
            apart(run)
        kept = {}
        for name, (file, most) in FILES.items():
            duoka.save_weights(model, tmp_path / name / file, max_shard_size=most, metadata={"by": "a test"})
            kept[name] = [*names], sum(own), bool(sent)
            names.clear(), own.clear(), sent.clear()
        return kept, {name: value.full_tensor() if is_sharded(value) else value for name, value in state(model)}

    ranks = on_ranks(WORLD, work)
    whole = ranks[0][1]
    for name, (file, most) in FILES.items():
        found = [kept[name] for kept, _ in ranks]
        duoka.save_weights(whole, tmp_path / "whole" / name / file, max_shard_size=most, metadata={"by": "a test"})
        left, right = ({path.name: path for path in (tmp_path / part / name).iterdir()} for part in ("", "whole"))
        assert set(left) == set(right)
        if file.endswith(".safetensors"):
            assert all(left[part].read_bytes() == right[part].read_bytes() for part in left)
        other = net()
        duoka.load_weights(other, tmp_path / name / file)
        assert all(torch.equal(whole[key], value) for key, value in other.state_dict().items())
        assert [sent for *_, sent in found] == [not together] * WORLD
        if together:
            size = sum(tensor.numel() * tensor.itemsize for tensor in whole.values())
            every = sum(own for _, own, _ in found)
            assert every == size if file.endswith(".safetensors") else every > size  # with checksums
            assert max(own for _, own, _ in found) < every / 2
        else:
            written = [set(names) - {f"{file}.index.json"} for names, *_ in found]
            assert set.union(*written) == set(left) - {f"{file}.index.json"}
            assert sum(map(len, written)) == len(set.union(*written))  # no file by two ranks
            assert all(written) == (most is not None and file.endswith(".safetensors"))


def state(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.state_dict().items())


@pytest.mark.parametrize("together", [True, False])
def test_weights_that_one_rank_cannot_write_leave_the_old_files(together: bool, tmp_path: Path) -> None:
    def work(run: duoka.Run) -> list[str]:
        model, _ = trained(run)
        if not together:
            apart(run)
        return [failing(run, model, most) for most in (None, 200)]

    def failing(run: duoka.Run, model: nn.Module, most: int | None) -> str:
        folder = tmp_path / str(most)
        path = folder / "net.safetensors"
        duoka.save_weights(model, path, max_shard_size=most)
        run.barrier()
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        write = disk.write
        if run.rank == (0 if most is None and not together else 1):
            disk.write = full
        with pytest.raises(WeightsError) as raised:
            duoka.save_weights(model, path, max_shard_size=most)
        disk.write = write
        run.barrier()
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
        run.barrier()
        kept = model[3].weight.detach().clone()
        model[3].weight.data.zero_()
        duoka.save_weights(model, path, max_shard_size=most)  # and the ranks are in step
        model[3].weight.data.copy_(kept)
        return str(raised.value)

    for message in (message for messages in on_ranks(2, work) for message in messages):
        assert "No space left on device" in message
    for most in (None, 200):
        other = net()
        duoka.load_weights(other, tmp_path / str(most) / "net.safetensors")
        assert not other[3].weight.any()


def test_rows_arrive_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "BLOCK", 16)
    shapes = ((7, 5), (2, 9), (1, 2, 11), (4,))

    def work(run: duoka.Run) -> list[Any]:
        model = nn.Module()
        model.all = nn.ParameterList(torch.randn(shape) for shape in shapes)
        whole = {f"all.{number}": parameter.detach().clone() for number, parameter in enumerate(model.all)}
        tensors = dict(run.model(model, strategy="fsdp").state_dict())
        assert sum(map(is_sharded, tensors.values())) == len(shapes)
        files = [dict(list(tensors.items())[rank :: run.world_size]) for rank in range(run.world_size)]
        layouts = [lay_out(file, {}) for file in files]
        received = bytearray(layouts[run.rank].size)
        for at, part in sharded.exchange_rows([layout.offsets for layout in layouts], tensors, run._session.ranks):
            received[at : at + len(part)] = part
        own = {name: whole[name] for name in files[run.rank]}
        begin = len(layouts[run.rank].header)
        return len(own), received[begin:] == b"".join(
            own[name].numpy().tobytes() for name in layouts[run.rank].offsets
        )

    assert on_ranks(2, work) == [(2, True)] * 2


# Reading.

LARGE_SHAPES = ((71, 50), (2, 95), (1, 2, 113), (41, 3, 20), (1,))
SMALL = 16_384  # bytes: at least headers, random states and what is whole, and far less than the tensors


class Net(nn.Module):
    """Parameters that are sharded along several dimensions, one that stays whole, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in LARGE_SHAPES)
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
    model = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in LARGE_SHAPES)
    duoka.save_weights(model, tmp_path / "net.safetensors")
    expected = [value.float().tolist() for value in model]

    def work(run: duoka.Run) -> Any:
        with torch.device("meta" if on_meta else "cpu"):
            other = nn.ParameterList(torch.zeros(shape) for shape in LARGE_SHAPES)
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
