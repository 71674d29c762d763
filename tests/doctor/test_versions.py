from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from duoka.doctor.versions import check_engine, check_torch, check_tried, check_vendor, examine
from duoka.hardware.gpu import Gpu
from duoka.hardware.inventory import Inventory
from tests.hardware.driver import play

CARD = Gpu(0, "GPU-1", "H200", 1 << 37)


def test_gpus_on_which_no_test_has_run() -> None:
    (found,) = check_tried([CARD, replace(CARD, index=1), replace(CARD, name="H100")], {"H100"})
    assert found.what == "duoka's tests have not run on H200, only on simulated GPUs"
    assert "make gpu" in found.todo
    assert not list(check_tried([CARD], {"H200"}))


@pytest.mark.parametrize(
    ("version", "level"), [("2.13.0+cpu", "ok"), ("2.10.0", "ok"), ("2.9.1+cu126", "fault"), ("2.99.0", "advice")]
)
def test_torch(version: str, level: str) -> None:
    assert check_torch(version).level == level


def test_without_the_engine_in_c_it_says_so() -> None:
    assert check_engine(True).level == "ok"
    assert check_engine(False).level == "advice"
    assert "compiler" in check_engine(False).todo


def test_gloo_and_nccl_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    levels = {finding.subject: finding.level for finding in examine()}
    assert (levels["gloo"], levels["NCCL"]) == ("fault", "fault")


def test_gpus_that_torch_cannot_use() -> None:
    machine = Inventory((CARD,), 8, "", {"driver": "24.1"}, "Ascend", lacking="the package torch_npu is missing")
    driver, found = check_vendor(machine)
    assert (driver.what, found.level, found.what) == ("driver 24.1", "fault", "the package torch_npu is missing")
