from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import DeviceError
from duoka.hardware.choice import Choice, choose
from duoka.hardware.gpu import Device
from duoka.hardware.inventory import Gpu, Inventory
from duoka.hardware.spec import Request, parse

# As read from machines: names, UUIDs and memory are the driver's own.
H200 = Gpu(0, "GPU-3c1a6d0e-7f2b-5d44-9a3e-0b1c2d3e4f50", "NVIDIA H200", 150_754_820_096)
RTX = (
    Gpu(0, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "NVIDIA GeForce RTX 4090", 25_757_220_864),
    Gpu(1, "GPU-8a0c1e53-1c7e-2d0f-7c53-56b3f5b0d0aa", "NVIDIA GeForce RTX 3060", 12_884_901_888),
)
A100 = tuple(
    Gpu(
        index,
        f"GPU-{index}{index}c05a1b-0000-4000-8000-00000000000{index}",
        "NVIDIA A100-SXM4-80GB",
        85_899_345_920,
    )
    for index in range(8)
)
NONE = Inventory((), 2, "no NVIDIA driver answers here (NVML Shared Library Not Found)")
ONE, TWO, EIGHT = (Inventory(gpus, 16, "") for gpus in ((H200,), RTX, A100))


def gpus(choice: Choice) -> list[int | None]:
    assert {device.type for device in choice.devices} == {"cuda"}
    return [device.index for device in choice.devices]


@pytest.mark.parametrize(
    ("text", "inventory", "numbers"),
    [
        ("auto", ONE, [0]),
        ("auto", EIGHT, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("cuda", TWO, [0, 1]),
        ("1", EIGHT, [0]),
        ("3", EIGHT, [0, 1, 2]),
        ("0,", ONE, [0]),
        ("7,2", EIGHT, [7, 2]),
        ("4-6", EIGHT, [4, 5, 6]),
        ("cuda:1", TWO, [1]),
    ],
)
def test_gpus(text: str, inventory: Inventory, numbers: list[int]) -> None:
    choice = choose(parse(text), inventory)
    assert gpus(choice) == numbers
    assert choice.notes == ()
    assert [device.name for device in choice.devices] == [inventory.gpus[number].name for number in numbers]


@pytest.mark.parametrize(
    ("text", "inventory", "count"),
    [("auto", NONE, 1), ("3", NONE, 3), ("cpu", EIGHT, 1), ("cpu:4", NONE, 4), ("cpu:4", EIGHT, 4)],
)
def test_cpu_workers(text: str, inventory: Inventory, count: int) -> None:
    assert choose(parse(text), inventory) == Choice((Device("cpu"),) * count)


@pytest.mark.parametrize(
    ("visible", "text", "numbers", "mapping"),
    [
        ("2,3", "auto", [2, 3], "cuda:0 = GPU 2, cuda:1 = GPU 3"),
        ("3,2", "auto", [3, 2], "cuda:0 = GPU 3, cuda:1 = GPU 2"),
        ("2,3", "1", [2], "cuda:0 = GPU 2"),
        ("2,3", "3,", [3], "cuda:0 = GPU 3"),
        (" 2 , 3 ", "3,2", [3, 2], "cuda:0 = GPU 3, cuda:1 = GPU 2"),
        ("GPU-55c05a1b", "auto", [5], "cuda:0 = GPU 5"),
        ("GPU-5,0", "cuda", [5, 0], "cuda:0 = GPU 5, cuda:1 = GPU 0"),
        ("0,1,-1,2", "auto", [0, 1], "cuda:0 = GPU 0, cuda:1 = GPU 1"),
    ],
)
def test_visible_devices_are_respected(visible: str, text: str, numbers: list[int], mapping: str) -> None:
    choice = choose(parse(text), replace(EIGHT, visible=visible))
    assert gpus(choice) == numbers
    assert choice.notes == (f"CUDA_VISIBLE_DEVICES={visible} respected: {mapping}",)


@pytest.mark.parametrize("visible", ["1,9,0", "1,GPU-ffff,0", "1,GPU-8,0", "1,1,0", "1,gpu1,0"])
def test_what_is_no_gpu_ends_the_list_as_in_cuda(visible: str) -> None:
    choice = choose(parse("auto"), replace(TWO, visible=visible))
    assert gpus(choice) == [1]
    assert "is no further GPU of this machine and ends the list" in choice.notes[0]


@pytest.mark.parametrize(("visible", "said"), [("", "set to nothing"), ("-1", "CUDA_VISIBLE_DEVICES=-1")])
def test_hidden_gpus_leave_the_cpu_and_a_note(visible: str, said: str) -> None:
    choice = choose(parse("auto"), replace(TWO, visible=visible))
    assert choice.devices == (Device("cpu"),)
    assert said in choice.notes[0]
    assert "hides all GPUs" in choice.notes[0]


@pytest.mark.parametrize(
    ("text", "inventory", "visible", "said"),
    [
        ("cuda", NONE, None, "--devices cuda: no NVIDIA driver answers here"),
        ("0,1", NONE, None, "no NVIDIA driver answers here"),
        ("cuda", TWO, "", "CUDA_VISIBLE_DEVICES, set to nothing, hides all GPUs; use auto or cpu"),
        ("cuda", TWO, "-1", "CUDA_VISIBLE_DEVICES=-1 hides all GPUs"),
        ("2,", TWO, None, "GPU 2 cannot be used; this machine has GPUs 0 and 1 (numbers as in nvidia-smi)"),
        ("0,1", ONE, None, "GPU 1 cannot be used; this machine has GPU 0"),
        ("3", TWO, None, "3 GPUs are asked for; this machine has GPUs 0 and 1"),
        ("0,", EIGHT, "2,3", "GPU 0 cannot be used; CUDA_VISIBLE_DEVICES=2,3 allows GPUs 2 and 3"),
        ("3", EIGHT, "3,2", "3 GPUs are asked for; CUDA_VISIBLE_DEVICES=3,2 allows GPUs 2 and 3"),
        ("cuda", ONE, "MIG-7a1b", "CUDA_VISIBLE_DEVICES=MIG-7a1b hides all GPUs"),
        ("xpu", NONE, None, "this machine has no xpu device; use auto or cpu"),
    ],
)
def test_what_is_not_there_is_said(text: str, inventory: Inventory, visible: str | None, said: str) -> None:
    with pytest.raises(DeviceError) as error:
        choose(parse(text), replace(inventory, visible=visible))
    assert said in str(error.value)


@given(st.permutations(range(8)), st.integers(1, 8), st.data())
def test_only_visible_gpus_are_chosen(order: list[int], count: int, data: st.DataObject) -> None:
    allowed = order[:count]
    visible = ",".join(map(str, allowed))
    assert gpus(choose(Request("auto"), replace(EIGHT, visible=visible))) == allowed
    asked = data.draw(st.lists(st.integers(0, 7), min_size=1, unique=True))
    request = Request("cuda", indices=tuple(asked))
    if set(asked) <= set(allowed):
        assert gpus(choose(request, replace(EIGHT, visible=visible))) == asked
    else:
        with pytest.raises(DeviceError):
            choose(request, replace(EIGHT, visible=visible))


def test_devices_are_called_as_people_call_them() -> None:
    named = (Device("cuda", 3, "NVIDIA H200"), Device("cpu"), Device("xpu", 1))
    assert [str(device) for device in named] == ["GPU 3", "CPU", "GPU 1"]
