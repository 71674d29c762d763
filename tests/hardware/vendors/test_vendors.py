from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import duoka
from duoka.errors import DeviceError
from duoka.hardware import inventory
from duoka.hardware.choice import choose
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.spec import parse
from duoka.hardware.vendors import VENDORS, variables_for, visible
from duoka.hardware.vendors.report import Report

SOURCE = Path(duoka.__file__).parent
NAMES = re.compile(r"cuda|nccl|hccl|xccl|\bxpu|\bnpu|\bhip\b", re.IGNORECASE)
# What other files may name: words of torch, torchrun and scripts, for which torch has no general one.
THEIR_OWN = {
    "__init__.py": ["torch.cuda.is_available()", "use CUDA", "PYTORCH_NVML_BASED_CUDA_CHECK"],  # before all else
    "system/environment.py": ["TORCH_NCCL_ASYNC_ERROR_HANDLING"],  # which torchrun sets
    "private/torch.py": ["_dump_nccl_trace", "_cuda_getArchFlags", "a CUDA build", "torch.cuda.get_arch_list"],
    "script/signs.py": ["is_nccl_available"],  # which scripts call
}
GPUS = (Device("cuda", 3), Device("cuda", 0))
CARDS = tuple(Gpu(index, f"NPU-{index}", "Ascend 910B3", 1 << 36) for index in range(4))


@pytest.mark.parametrize(("devices", "names"), [(GPUS, "3,0"), (GPUS[:1], "3"), ([Device("cpu")] * 2, "")])
def test_a_process_sees_the_chosen_devices_alone_and_in_their_order(devices: Sequence[Device], names: str) -> None:
    found = variables_for(devices)
    assert found["CUDA_VISIBLE_DEVICES"] == found["HIP_VISIBLE_DEVICES"] == names
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found.get("ASCEND_RT_VISIBLE_DEVICES") == (None if devices[0].type == "cuda" else "")


def test_a_part_of_a_card_is_named_by_its_uuid() -> None:
    found = variables_for([Device("cuda", 3, "A100", "MIG-5a2f", part=0)])
    assert found["CUDA_VISIBLE_DEVICES"] == "MIG-5a2f"


def test_what_a_process_sees_by_the_first_variable_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    assert (visible("cuda"), visible("xpu"), visible("mps")) == (None, None, None)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert (visible("cuda"), visible("xpu")) == ("1", "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four NPUs and nothing else."""
    for vendor in VENDORS.values():
        monkeypatch.setattr(vendor, "ask", Report)
    monkeypatch.setattr(VENDORS["Ascend"], "ask", lambda: Report(CARDS))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("words", "numbers"),
    [("auto", [0, 1, 2, 3]), ("2", [0, 1]), ("3,1", [1, 3]), ("npu", [0, 1, 2, 3]), ("npu:2", [2]), ("gpu:1", [1])],
)
def test_npus_by_every_word(words: str, numbers: list[int]) -> None:
    devices = choose(parse(words), inventory.read(parse(words).type)).devices
    assert [(device.type, device.index) for device in devices] == [("npu", number) for number in numbers]
    assert variables_for(devices) == {"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, numbers))}


@pytest.mark.usefixtures("machine")
def test_what_the_vendor_s_variable_hides_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
    choice = choose(parse("auto"), inventory.read())
    assert [device.index for device in choice.devices] == [2, 3]
    assert choice.notes == ("ASCEND_RT_VISIBLE_DEVICES=2,3 respected: npu:0 = GPU 2, npu:1 = GPU 3",)
    with pytest.raises(DeviceError, match="ASCEND_RT_VISIBLE_DEVICES=2,3 allows GPUs 2 and 3"):
        choose(parse("1,"), inventory.read())


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("words", ["cuda", "cuda:0", "xpu", "mps"])
def test_a_type_that_the_machine_lacks_is_refused(words: str) -> None:
    with pytest.raises(DeviceError, match=f"--devices {words}: this machine has no GPU; use auto or cpu"):
        choose(parse(words), inventory.read(parse(words).type))


def test_a_mac_has_one_device_which_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    apple: ModuleType = VENDORS["Apple"]  # type: ignore[assignment]
    monkeypatch.setattr(apple.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(apple.platform, "machine", lambda: "arm64")
    assert choose(parse("auto"), inventory.read()).devices == (Device("cpu"),)
    (device,) = choose(parse("mps"), inventory.read("mps")).devices
    assert (str(device), device.type, variables_for([device])) == ("GPU 0", "mps", {})
    with pytest.raises(DeviceError, match="this machine has GPU 0"):
        choose(parse("mps:1"), inventory.read("mps"))


def test_gpus_of_two_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first vendor that torch can use are taken; the others are told."""
    for vendor in VENDORS.values():
        monkeypatch.setattr(vendor, "ask", Report)
    monkeypatch.setattr(VENDORS["NVIDIA"], "ask", lambda: Report(CARDS[:1], lacking="torch lacks it"))
    monkeypatch.setattr(VENDORS["Intel"], "ask", lambda: Report(CARDS[:2]))
    choice = choose(parse("auto"), inventory.read())
    assert [device.type for device in choice.devices] == ["xpu", "xpu"]
    assert choice.notes == ("there are also 1 NVIDIA GPUs (torch lacks it)",)
    assert [device.type for device in choose(parse("cuda"), inventory.read("cuda")).devices] == ["cuda"]


def test_only_files_of_vendors_name_one() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.[pch]*")):
        name = str(path.relative_to(SOURCE))
        if path.suffix not in (".py", ".c", ".h") or name.startswith(("hardware/vendors/", "doctor/nvidia.py")):
            continue
        text = path.read_text()
        for word in THEIR_OWN.get(name, []):
            assert word in text, f"{name} does not name {word} any more"
            text = text.replace(word, "")
        found |= {f"{name}:{text[: match.start()].count(chr(10)) + 1}": match[0] for match in NAMES.finditer(text)}
    assert not found
