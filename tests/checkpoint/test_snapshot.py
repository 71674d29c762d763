"""Checkpoints of sharded models: every rank writes, nobody holds the whole, and faults leave the earlier one."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open
from torch import Tensor, nn

import duoka
from duoka.checkpoint import snapshot
from duoka.checkpoint.directory import FileEntry
from duoka.checkpoint.saving import part_names
from duoka.errors import CheckpointError, RunError
from duoka.system import disk
from tests.checkpoint.runs import WORLD, apart, die, exchanges, fault, full, net, trained
from tests.run.ranks import on_ranks


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    def listed(tensor: Tensor) -> Any:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()

    state = [value for kept in optimizer.state_dict()["state"].values() for value in kept.values()]
    return [*map(listed, model.state_dict().values()), *map(listed, state)]


def save(run: duoka.Run, root: Path) -> list[Any]:
    model, optimizer = trained(run)
    saved = run.checkpoint(root, model=model, optimizer=optimizer, note=[run.world_size])
    saved.step()
    saved.save()
    saved.wait()
    return values(model, optimizer)


def restore(run: duoka.Run, root: Path, strategy: str) -> Any:
    model = run.model(net(), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    note = [0]
    saved = run.checkpoint(root, model=model, optimizer=optimizer, note=note)
    assert saved.restore() is not None
    return values(model, optimizer), note


@pytest.mark.parametrize("together", [True, False])
def test_files_hold_whole_tensors(together: bool, tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        wrote, sent = disk.write, exchanges()
        written: dict[str, int] = {}

        def write(path: Path, data: Any) -> None:
            written[path.name] = sum(len(part) for _, part in data)
            wrote(path, data)

        disk.write = write
        if not together:
            apart(run)
        return save(run, tmp_path / "out"), written, bool(sent)

    found = on_ranks(WORLD, work)
    expected = found[0][0]
    (step,) = (tmp_path / "out").glob("step-*")
    files = part_names("model", WORLD, ".safetensors")
    sizes = [(step / file).stat().st_size for file in files]
    assert [sent for *_, sent in found] == [not together] * WORLD
    for rank, (_, written, _) in enumerate(found):
        own = {file: written[file] for file in files if file in written}
        if together:
            assert 0 < sum(own.values()) < sum(sizes) / 2
        else:
            assert own == {files[rank]: sizes[rank]}
    assert sum(written.get(file, 0) for _, written, _ in found for file in files) == sum(sizes)
    assert not [path for path in step.iterdir() if path.name.startswith(("rank-", "."))]

    index = json.loads((step / "model.safetensors.index.json").read_text())
    whole: dict[str, Tensor] = {}
    for file in files:
        with safe_open(step / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        tensors = load_file(step / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == set(tensors)
        whole |= tensors
    model = net()
    model.load_state_dict(whole)
    assert [value.tolist() for value in model.state_dict().values()] == expected[: len(whole)]
    largest = max(tensor.numel() * tensor.itemsize for tensor in whole.values())
    assert max(sizes) - min(sizes) < 2 * largest

    for path in (step, tmp_path / "out", step / "model.safetensors.index.json"):
        other = net()
        assert len(duoka.load_weights(other, path).loaded) == len(whole)
        assert [value.tolist() for value in other.state_dict().values()] == expected[: len(whole)]


def test_it_is_restored_on_any_number_of_ranks(tmp_path: Path) -> None:
    expected = on_ranks(2, lambda run: save(run, tmp_path))[0]
    for ranks, strategy in ((1, "auto"), (2, "auto"), (2, "fsdp"), (3, "fsdp")):
        for found, note in on_ranks(ranks, lambda run: restore(run, tmp_path, strategy)):  # noqa: B023
            assert (found, note) == (expected, [2])


def test_ranks_read_no_more_than_a_tensor_at_a_time(tmp_path: Path) -> None:
    on_ranks(2, lambda run: save(run, tmp_path))

    def work(run: duoka.Run) -> Any:
        model = run.model(net(), strategy="fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run.checkpoint(tmp_path, model=model, optimizer=optimizer, note=[0]).restore()
        moments = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].dim()]
        return [moment.to_local().untyped_storage().nbytes() for moment in moments], [m.shape for m in moments]

    (one, shapes), (two, _) = on_ranks(2, work)
    assert [a + b for a, b in zip(one, two, strict=True)] == [4 * shape.numel() for shape in shapes]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_on_any_rank_is_an_error_on_all_and_leaves_the_earlier_one(victim: int, tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        model, optimizer = trained(run)
        saved = run.checkpoint(tmp_path, model=model, optimizer=optimizer)
        saved.save()
        saved.wait()
        write = disk.write
        if run.rank == victim:
            disk.write = full
        saved.step_number += 1
        saved.save()
        with pytest.raises(CheckpointError) as raised:
            saved.wait()
        disk.write = write
        saved.save()  # and the next one is complete
        saved.wait()
        return str(raised.value)

    for message in on_ranks(2, work):
        assert "No space left on device" in message
    assert len(list(tmp_path.glob("step-*"))) == 2
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_during_the_write_leaves_the_earlier_one(victim: int, tmp_path: Path) -> None:
    expected = on_ranks(2, lambda run: save(run, tmp_path))[0]

    def work(run: duoka.Run) -> None:
        model = run.model(net(), strategy="fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        saved = run.checkpoint(tmp_path, model=model, optimizer=optimizer, note=[0])
        saved.restore()
        for parameter in model.parameters():
            parameter.data.zero_()
        if run.rank == victim:
            disk.write = lambda path, data: os.kill(os.getpid(), signal.SIGKILL)
        saved.step()
        saved.save()
        saved.wait()

    with pytest.raises(RunError, match="SIGKILL"):
        on_ranks(2, work)
    for found, note in on_ranks(2, lambda run: restore(run, tmp_path, "fsdp")):
        assert (found, note) == (expected, [2])


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_every_call_leaves_the_old_or_the_new(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def next_step(run: duoka.Run, root: Path, number: int, act: Callable[[str], None]) -> int:
        model, optimizer = net(), None
        run.model(model, strategy="fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        saved = run.checkpoint(root, model=model, optimizer=optimizer, note=[0])
        saved.restore()
        for parameter in model.parameters():
            parameter.data.fill_(7)
        saved.step()
        with fault(monkeypatch, number if run.rank == victim else -1, act) as calls:
            saved.save()
            saved.wait()
        return len(calls)

    old = on_ranks(2, lambda run: save(run, tmp_path / "out"))[0]
    shutil.copytree(tmp_path / "out", tmp_path / "tried")
    count = on_ranks(2, lambda run: next_step(run, tmp_path / "tried", -1, die))[victim]
    new = on_ranks(2, lambda run: restore(run, tmp_path / "tried", "fsdp"))[0][0]
    found = []
    for number in range(count):
        root = tmp_path / f"at-{number}"
        shutil.copytree(tmp_path / "out", root)
        with pytest.raises(RunError, match="SIGKILL"):
            on_ranks(2, lambda run: next_step(run, root, number, die))  # noqa: B023
        (left, _), *_ = on_ranks(2, lambda run: restore(run, root, "fsdp"))  # noqa: B023
        found.append([old, new].index(left))
        assert not list(root.glob(".*.partial"))
    with capsys.disabled():
        print(f" [killed at each of {count} calls: {found.count(0)} times the old, {found.count(1)} the new]", end="")
    assert count > 5
    assert found == sorted(found)


def save_until_killed(run: duoka.Run, root: Path, first: int, after: float) -> None:
    """Save checkpoints and weights with ever higher values, until a rank is killed after so many seconds."""
    model = run.model(net(), strategy="fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for (ids,) in run.loader((torch.arange(11),), batch_size=11):
        (model(ids).square().mean() * model.scale).backward()
        optimizer.step()
    note = [0]
    saved = run.checkpoint(root / "kept", model=model, optimizer=optimizer, note=note)
    saved.restore()
    victim = run.rank == first % run.world_size
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start() if victim else None
    for value in itertools.count(first):
        for tensor in [*model.state_dict().values(), *(it["momentum_buffer"] for it in optimizer.state.values())]:
            tensor.detach().fill_(value)
        note[0] = value
        saved.step_number += 1
        saved.save()
        for name in WEIGHTS:
            duoka.save_weights(model, root / name)


WEIGHTS = ("net.safetensors", "net.pth")


def the_value(root: Path) -> list[int]:
    """Return the value of the newest checkpoint and of each file of weights; fails if the numbers of one differ."""
    model, note = net(), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = duoka.Checkpoint(root / "kept", {"model": model, "optimizer": optimizer, "note": note})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged
        assert saved.restore() is not None
    saved.close()
    found = []
    kept = [it["momentum_buffer"] for it in optimizer.state.values()]
    for file in (None, *WEIGHTS):
        if file is not None:
            duoka.load_weights(model, root / file)
        tensors = [*model.state_dict().values(), *([] if file else [*kept, torch.tensor(note)])]
        (value,) = {value for tensor in tensors for value in tensor.flatten().tolist()}
        found.append(int(value))
    return found


@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_hundreds_of_kills_at_random_moments(
    part: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(f"{request.config.getoption('--seed')} {part}")
    last, within, progress = [1, 1, 1], 0, 0
    for number in range(100):
        after = 3.0 if number == 0 else rng.uniform(0, 0.3)  # the first one writes all files
        with pytest.raises(RunError, match="SIGKILL"):
            on_ranks(2, lambda run: save_until_killed(run, tmp_path, max(last) + 1, after))  # noqa: B023
        within += bool([*tmp_path.glob(".*.partial"), *tmp_path.glob("kept/.*.partial")])
        found = the_value(tmp_path)
        assert all(now >= before for now, before in zip(found, last, strict=True))
        progress += found != last
        last = found
        duoka.save_weights({"any": torch.ones(1)}, tmp_path / "any.safetensors")
        assert not [*tmp_path.glob(".*.partial"), *tmp_path.glob("kept/.*.partial")]
    with capsys.disabled():
        print(f" [100 kills: {within} within a save; after {progress} something new was there]", end="")
    assert within > 10
    assert progress > 10


def test_rank_0_waits_for_whoever_still_writes(tmp_path: Path) -> None:
    entries = {"a": FileEntry(3, "digest")}
    snapshot.report(tmp_path, 1, entries)
    with pytest.raises(CheckpointError, match="rank 2, 3 has written nothing of the checkpoint for 0 s"):
        snapshot.wait_for(tmp_path, (1, 2, 3), patience=0.05)
    snapshot.report(tmp_path, 1, entries)
    snapshot.give_up(tmp_path, 2, "a reason")
    with pytest.raises(CheckpointError, match="rank 2 could not write its part of the checkpoint: a reason"):
        snapshot.wait_for(tmp_path, (1, 2))
    snapshot.report(tmp_path, 1, entries)
    assert snapshot.wait_for(tmp_path, (1,)) == entries
    assert [path.name for path in tmp_path.iterdir()] == ["rank-2.json"]
