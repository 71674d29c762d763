from __future__ import annotations

import pytest

from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory
from duoka.doctor.versions import of_cuda, of_torch

CARD = Gpu(0, "GPU-1", "H200", 1 << 37)


@pytest.mark.parametrize(("version", "level"), [("2.13.0+cpu", "ok"), ("2.10.0", "ok"), ("2.9.1+cu126", "fault")])
def test_torch(version: str, level: str) -> None:
    assert of_torch(version).level == level


@pytest.mark.parametrize(
    ("built", "runs", "level"),
    [
        ("12.6", "12.4", "ok"),
        ("13.0", "12.4", "fault"),
        ("12.6", "13.0", "ok"),
        (None, "12.4", "fault"),
        ("12.6", "", "ok"),
    ],
)
def test_cuda_and_the_driver(built: str | None, runs: str, level: str) -> None:
    assert of_cuda(built, Inventory((CARD,), 8, "", "550.54", runs)).level == level


def test_cuda_is_not_needed_without_a_card() -> None:
    assert of_cuda(None, Inventory()).level == "ok"
