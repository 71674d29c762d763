from __future__ import annotations

import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import duoka
from duoka.errors import AskedError, BatchFailed, OptionError, RunError, TimedOut
from duoka.inference import predict as predicting
from duoka.inference import replicas
from duoka.inference.predict import WINDOW
from duoka.inference.replicas import replicate
from tests.flows.flow import Flow
from tests.inference.models import Double, Failing, Mortal, Slow

DEVICES = ["cpu", "cpu:2", "cpu:3"]


@pytest.mark.parametrize("devices", DEVICES)
def test_every_item_once_and_in_order(devices: str) -> None:
    items = torch.arange(500.0)
    outputs = list(duoka.predict(Slow(), items, devices=devices, batch_size=7))
    assert torch.equal(torch.stack(outputs), items * 2)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 4), st.booleans())
@settings(max_examples=40)
def test_whatever_the_sizes(items: int, size: int, count: int, lazily: bool) -> None:
    data = torch.arange(float(items))
    source = iter(data) if lazily else data
    outputs = list(duoka.predict(Double(), source, devices=f"cpu:{count}", batch_size=size))
    assert [output.item() for output in outputs] == [2.0 * item for item in range(items)]


@pytest.mark.parametrize("devices", DEVICES)
def test_a_generator_is_read_only_as_far_as_the_window_goes(devices: str) -> None:
    read = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal read
        while True:
            read += 1
            yield torch.tensor(float(read))

    outputs = duoka.predict(Double(), endless(), devices=devices, batch_size=5)
    assert read == 0
    for place in range(1, 101):
        assert next(outputs).item() == 2 * place
        assert read <= 5 * ((place - 1) // 5 + WINDOW * int(devices[4:] or 1))
    outputs.close()
    assert list(outputs) == []


def test_one_slow_batch_holds_the_others_back_only_at_the_window() -> None:
    release, read = threading.Event(), []

    def waits(x: torch.Tensor) -> bool:
        if x[0] == 0:
            release.wait(20)
        return False

    def items() -> Iterator[torch.Tensor]:
        for item in range(100):
            read.append(item)
            if len(read) == WINDOW * 2:
                release.set()
            yield torch.tensor(float(item))

    model = Failing(waits, RuntimeError)
    assert len(list(duoka.predict(model, items(), devices="cpu:2", batch_size=1))) == 100
    assert release.is_set()


def test_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.BatchNorm1d(4))
    model[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = torch.randn(20, 4)
    for devices in DEVICES:
        outputs = duoka.predict(model, data, devices=devices, batch_size=8)
        first = next(outputs)
        assert [module.training for module in model.modules()] == [True, False, True, True]
        rest = outputs.stack()
        assert not first.requires_grad
        with torch.no_grad():
            expected = model[2].eval()(model[0](data))
            model[2].train()
        torch.testing.assert_close(torch.cat([first[None], rest]), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    threads = torch.get_num_threads()
    assert threading.active_count() == 1 or threads >= 1


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("end", ["error", "close", "forgotten"])
def test_the_model_is_as_it_was_also_where_it_breaks_off(devices: str, end: str) -> None:
    model = nn.Sequential(nn.Dropout(0.9), Failing(lambda x: end == "error" and bool((x > 20).any()), KeyError))
    outputs = duoka.predict(model, torch.arange(60.0), devices=devices, batch_size=3)
    assert next(outputs).item() == 0
    if end == "error":
        with pytest.raises(BatchFailed):
            list(outputs)
    elif end == "close":
        outputs.close()
    del outputs
    gc.collect()
    assert [module.training for module in model.modules()] == [True] * 3
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("duoka-predict")]


def test_ten_thousand_items_of_uneven_cost_are_in_order() -> None:
    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            work = torch.ones(40, 40)
            for _ in range(int(x[0]) * 7919 % 30):
                work = work @ work
            return x * 2

    outputs = list(duoka.predict(Uneven(), torch.arange(10_000.0), devices="cpu:3", batch_size=16))
    assert [int(output) for output in outputs] == list(range(0, 20_000, 2))


def test_threads_of_torch_are_put_back() -> None:
    before = torch.get_num_threads()
    list(duoka.predict(Double(), torch.arange(9.0), devices="cpu:2", batch_size=2))
    assert torch.get_num_threads() == before


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            raise ValueError("item 5 is broken")
        return torch.tensor(float(index)), index


@pytest.mark.parametrize("devices", DEVICES)
def test_a_loader_and_datasets_with_labels(devices: str) -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = DataLoader(data, batch_size=4)
    for source in (data, loader):
        outputs = duoka.predict(Double(), source, devices=devices, batch_size=3)
        assert torch.equal(outputs.stack(), torch.arange(10.0) * 2)


@pytest.mark.parametrize("devices", DEVICES)
def test_a_batch_that_fails_names_its_items(devices: str) -> None:
    model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
    outputs = duoka.predict(model, torch.arange(30.0), devices=devices, batch_size=5)
    seen = []
    with pytest.raises(BatchFailed, match=r"items 10 to 14 on cpu: ValueError: unlucky") as error:
        seen += [output.item() for output in outputs]
    assert error.value.indices == range(10, 15)
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize("devices", DEVICES)
def test_failures_are_collected_in_their_places(devices: str) -> None:
    model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
    predictions = duoka.predict(model, torch.arange(30.0), devices=devices, batch_size=5, on_error="collect")
    outputs = list(predictions)
    assert len(outputs) == 30
    assert [place for place, output in enumerate(outputs) if isinstance(output, BatchFailed)] == list(range(10, 15))
    assert [failure.indices for failure in predictions.failures] == [range(10, 15)]
    with pytest.raises(BatchFailed):
        duoka.predict(model, torch.arange(30.0), devices=devices, batch_size=5, on_error="collect").stack()


def test_an_item_that_cannot_be_read_costs_its_batch() -> None:
    predictions = duoka.predict(Double(), Pairs(), devices="cpu:2", batch_size=2, on_error="collect")
    outputs = list(predictions)
    assert [place for place, output in enumerate(outputs) if isinstance(output, BatchFailed)] == [4, 5]
    assert "items 4 to 5 on the data: ValueError: item 5 is broken" in str(predictions.failures[0])
    with pytest.raises(BatchFailed, match="item 5 is broken"):
        list(duoka.predict(Double(), Pairs(), batch_size=2))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError,
    ],
)
def test_out_of_memory_halves_the_batch_and_goes_on(devices: str, error: type[Exception]) -> None:
    sizes = []

    def too_large(x: torch.Tensor) -> bool:
        sizes.append(len(x))
        return len(x) > 3

    outputs = duoka.predict(Failing(too_large, error), torch.arange(64.0), devices=devices, batch_size=16).stack()
    assert torch.equal(outputs, torch.arange(64.0) * 2)
    workers = int(devices[4:] or 1)
    assert sum(size > 3 for size in sizes) <= 3 * workers  # 16, 8, 4: learned once on each device


def test_one_item_that_does_not_fit_fails() -> None:
    model = Failing(lambda x: True, lambda: torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(BatchFailed, match=r"items 0 to 3 on cpu: torch\.OutOfMemoryError"):
        list(duoka.predict(model, torch.arange(8.0), batch_size=4))


def test_batches_of_a_device_that_dies_are_done_by_the_others() -> None:
    for _ in range(5):
        outputs = duoka.predict(Mortal(2), torch.arange(100.0), devices="cpu:3", batch_size=3, timeout=30)
        assert torch.equal(outputs.stack(), torch.arange(100.0) * 2)


def test_the_last_device_that_dies_ends_it() -> None:
    with pytest.raises((RunError, BatchFailed), match="illegal memory access"):
        list(duoka.predict(Mortal(2), torch.arange(100.0), devices="cpu:2", batch_size=3))


def test_a_batch_that_kills_devices_is_not_given_to_all_of_them() -> None:
    model = Failing(lambda x: bool((x == 4).any()), lambda: RuntimeError("CUDA error: device-side assert triggered"))
    predictions = duoka.predict(model, torch.arange(100.0), devices="cpu:4", batch_size=2, on_error="collect")
    outputs = list(predictions)
    assert [failure.indices for failure in predictions.failures] == [range(4, 6)]
    assert sum(not isinstance(output, BatchFailed) for output in outputs) == 98


def test_a_device_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "STOP_LIMIT", 0.1)
    over = threading.Event()

    def hangs(x: torch.Tensor) -> bool:
        return bool(x[0] == 6) and over.wait(30)

    model = Failing(hangs, RuntimeError)
    with pytest.raises(TimedOut, match=r"finished in 0.5 s; cpu computes the batch that begins with item 6"):
        list(duoka.predict(model, torch.arange(9.0), devices="cpu:2", batch_size=3, timeout=0.5))
    over.set()


def test_precision_is_that_of_autocast() -> None:
    model, data = nn.Linear(8, 2), torch.randn(4, 8)
    assert duoka.predict(model, data).stack().dtype == torch.float32
    assert duoka.predict(model, data, precision="bf16").stack().dtype == torch.bfloat16


def test_parameters_are_not_copied_on_one_processor() -> None:
    seen: set[int] = set()

    class Looks(Double):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(self.weight.data_ptr())
            return super().forward(x)

    model = Looks()
    list(duoka.predict(model, torch.arange(9.0), devices="cpu:3", batch_size=1))
    assert seen == {model.weight.data_ptr()}


def test_weights_are_copied_once_to_each_device_and_outputs_can_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" computes shapes only, and otherwise behaves like others."""
    copied: list[torch.device] = []

    def count(model: nn.Module, device: torch.device, share_buffers: bool) -> nn.Module:
        copied.append(device)
        return replicate(model, device, share_buffers)

    monkeypatch.setattr(predicting, "replicate", count)
    model = nn.Linear(3, 2)
    outputs = list(duoka.predict(model, torch.ones(50, 3), devices=["meta", "meta"], batch_size=4, outputs="device"))
    assert copied == [torch.device("meta")] * 2
    assert [(output.device.type, output.shape) for output in outputs] == [("meta", (2,))] * 50
    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"model": len}, "model must be a torch.nn.Module"),
        ({"data": 3}, "data must be a dataset, a DataLoader"),
        ({"data": "x.npy"}, "data must be a dataset, a DataLoader"),
        ({"data": torch.tensor(1.0)}, "this one has no rows"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number from 1"),
        ({"devices": []}, "devices must be a list of at least one device"),
        ({"devices": "gpus"}, "write gpu"),
        ({"precision": "half"}, "precision must be one of fp32, bf16, fp16"),
        ({"outputs": "gpu"}, "outputs must be one of cpu, device"),
        ({"on_error": "ignore"}, "on_error must be one of raise, collect"),
    ],
)
def test_what_cannot_be(how: dict[str, object], said: str) -> None:
    arguments = {"model": Double(), "data": torch.arange(3.0)} | how
    with pytest.raises(OptionError, match=said):
        duoka.predict(**arguments)  # type: ignore[arg-type]


class Two(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask


def test_what_a_model_gets_is_never_guessed() -> None:
    data = TensorDataset(torch.ones(4), torch.zeros(4))
    with pytest.raises(AskedError, match=r"a batch has 2 parts, and forward takes 1 to 2; say which"):
        list(duoka.predict(Two(), data, devices="cpu:2"))
    assert duoka.predict(Two(), data, inputs=lambda batch: batch[0]).stack().tolist() == [1.0] * 4
    assert duoka.predict(Two(), data, inputs=tuple).stack().tolist() == [0.0] * 4
    named = {"x": torch.ones(4), "mask": torch.full((4,), 3.0)}
    assert duoka.predict(Two(), named, batch_size=3).stack().tolist() == [3.0] * 4


def test_outputs_of_any_structure() -> None:
    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"twice": x * 2, "pair": (x, [str(one.item()) for one in x]), "none": None}

    stacked = duoka.predict(Many(), torch.arange(5.0), devices="cpu:2", batch_size=2).stack()
    assert stacked["twice"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert stacked["pair"][1] == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    assert stacked["none"] == [None] * 5


def test_a_model_that_gives_no_row_for_each_item_is_refused() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.raises(AskedError, match=r"one row for each of 3 items, but a part is a tensor of shape \(\)"):
        list(duoka.predict(Sums(), torch.arange(9.0), batch_size=3))


@pytest.mark.parametrize("end", [pytest.param("return", marks=pytest.mark.long), "raise SystemExit(3)"])
def test_a_program_can_end_in_the_middle(tmp_path: Path, end: str) -> None:
    """In a separate interpreter, since threads inside torch could crash its exit."""
    source = f"""
import torch, duoka

class Long(torch.nn.Module):
    def forward(self, x):
        weights = torch.randn(400, 400)
        for _ in range(int(x) * 100_000):
            weights = torch.tanh(weights @ weights)
        return x

def short(outputs):
    for output in outputs:
        {end}

outputs = duoka.predict(Long(), torch.arange(50), devices="cpu:3", batch_size=1)
short(outputs)
print("over")
"""
    (tmp_path / "script.py").write_text(source)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (3 if "Exit" in end else 0, "")


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_ctrl_c_ends_it_at_once(flow: Flow, devices: str) -> None:
    source = f"""
        import sys, time, torch, duoka

        class Sleeps(torch.nn.Module):
            def forward(self, x):
                print("computing", flush=True)
                time.sleep(50)
                return x

        list(duoka.predict(Sleeps(), torch.zeros(100), devices="{devices}", batch_size=1))
        """
    running = flow.start([flow.write("script.py", source)], program="python", timeout=40)
    while "computing" not in running.stdout():
        time.sleep(0.01)
    running.send(signal.SIGINT)
    result = running.wait()  # fails if it takes 40 s
    assert result.returncode == 1 or result.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in result.stderr


# The ranks of a job.


class Job:
    """Ranks as threads, which exchange pickled values as processes do."""

    def __init__(self, size: int) -> None:
        self.parts: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.parts)) as pool:
            futures = [pool.submit(function, Rank(self, rank)) for rank in range(len(self.parts))]
            return [future.exception() or future.result() for future in futures]


class Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.world_size = job, rank, len(job.parts)

    def gather_objects(self, value: Any) -> list[Any]:
        self.job.parts[self.rank] = pickle.dumps(value)
        self.job.barrier.wait()
        values = [pickle.loads(part) for part in self.job.parts]
        self.job.barrier.wait()
        return values


@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 4), st.sampled_from(["rows", "items", "lazily"]))
@settings(max_examples=30)
def test_every_rank_has_all_outputs_in_order(items: int, size: int, ranks: int, kind: str) -> None:
    def data() -> Any:
        rows = torch.arange(float(items))
        return {"rows": rows, "items": list(rows), "lazily": iter(rows)}[kind]

    def predict(rank: Rank) -> list[float]:
        return [
            output.item() for output in duoka.predict(Double(), data(), batch_size=size, devices="cpu", ranks=rank)
        ]

    assert Job(ranks).run(predict) == [[2.0 * item for item in range(items)]] * ranks


def test_each_batch_is_read_and_computed_by_one_rank() -> None:
    seen: list[float] = []

    class Items:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(float(index))
            return torch.tensor(float(index))

    Job(3).run(lambda rank: list(duoka.predict(Double(), Items(), batch_size=2, devices="cpu", ranks=rank)))
    assert sorted(seen) == [float(item) for item in range(20)]


def test_a_failure_of_one_rank_is_raised_by_all() -> None:
    def predict(rank: Rank) -> Any:
        model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
        return list(duoka.predict(model, torch.arange(30.0), batch_size=5, devices="cpu", ranks=rank))

    for error in Job(3).run(predict):
        assert isinstance(error, BatchFailed)
        assert error.indices == range(10, 15)
        assert str(error) == "items 10 to 14 on cpu: ValueError: unlucky"


def test_collected_failures_stand_in_their_places_on_every_rank() -> None:
    def predict(rank: Rank) -> list[int]:
        model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
        how: dict[str, Any] = {"batch_size": 5, "devices": "cpu", "on_error": "collect", "ranks": rank}
        outputs = duoka.predict(model, torch.arange(30.0), **how)
        return [place for place, output in enumerate(outputs) if isinstance(output, BatchFailed)]

    assert Job(2).run(predict) == [[10, 11, 12, 13, 14]] * 2


def test_rows_travel_as_one_batch() -> None:
    sent: list[int] = []

    class Counting(Rank):
        def gather_objects(self, value: Any) -> list[Any]:
            sent.append(len(pickle.dumps(value)))
            return super().gather_objects(value)

    outputs = duoka.predict(
        Double(), torch.zeros(100, 1000), batch_size=100, devices="cpu", ranks=Counting(Job(1), 0)
    )
    assert len(list(outputs)) == 100
    assert max(sent) < 1.2 * 100 * 1000 * 4


def test_what_a_generator_raises_passes_through() -> None:
    def items() -> Iterator[torch.Tensor]:
        yield torch.tensor(1.0)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        list(duoka.predict(Double(), items(), batch_size=1))
