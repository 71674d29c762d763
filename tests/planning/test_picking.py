from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import duoka
from duoka.errors import DeviceError, DevicesBusy, OptionError
from duoka.hardware import locks
from tests.hardware.driver import play


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cards of which 0, 2 and 5 are in use."""
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def test_cpus() -> None:
    assert duoka.devices("cpu:2") == (torch.device("cpu"), torch.device("cpu"))


def test_no_module_hides_the_function() -> None:
    import duoka.hardware.spec
    import duoka.planning.picking

    assert duoka.devices is duoka.planning.picking.devices


@pytest.mark.usefixtures("eight")
def test_picked_cards_are_kept_until_they_are_released() -> None:
    with duoka.devices("free:2") as first:
        assert first == (torch.device("cuda", 1), torch.device("cuda", 3))
        assert "picked GPU 1" in first.why[0]
        second = duoka.devices("free:3")
        assert [device.index for device in second] == [4, 6, 7]
        with pytest.raises(DevicesBusy, match="no GPUs are available now"):
            duoka.devices("free:1")
        second.release()
    assert duoka.devices("free:1")[0].index == 1


@pytest.mark.usefixtures("eight")
def test_numbers_are_physical_and_answers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,0,3")
    with duoka.devices("3,6") as named:
        assert [device.index for device in named] == [2, 0]
    assert [device.index for device in duoka.devices("free:1,mem>=79G")] == [2]


def test_a_part_is_all_that_this_process_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with duoka.devices("free:1") as (part,):
        assert part == torch.device("cuda", 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-22222222-0000-5000-8000-000000000002"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(DeviceError, match=r"GPU 0:0 is a part of a GPU \(MIG\): call duoka.devices before"):
        duoka.devices("MIG-1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_launch_queues_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with duoka.devices("free:2"), pytest.raises(DevicesBusy, match="free:4: 3 GPUs are available now"):
        duoka.launch(print, devices="free:4", wait=0.01)
    assert capsys.readouterr().err.startswith("duoka: waiting for devices: GPU 0: pid 4194301; GPU 1: ")


@pytest.mark.parametrize("wait", ["soon", "-1"])
def test_what_cannot_be(wait: str) -> None:
    with pytest.raises(OptionError, match="wait must be more than 0 seconds"):
        duoka.devices("cpu", wait=wait)
    with pytest.raises(OptionError, match="must be auto, cpu"):
        duoka.devices("frei:2")
