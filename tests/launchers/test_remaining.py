"""The next attempt after a device was lost, or memory ran out on a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duoka.devices import Device
from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory
from duoka.launchers.remaining import next_plan, part_to_try
from duoka.launchers.verdict import Verdict
from duoka.options import Machines
from duoka.plan import Kind, Plan
from tests.launchers.made import plan, raised, worker

GPUS = tuple(Gpu(index, f"GPU-{index}", "RTX 3090", 24 << 30) for index in range(3))
DEVICES = tuple(Device("cuda", gpu.index, gpu.name, gpu.uuid) for gpu in GPUS)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
BUG = "RuntimeError: CUDA error: an illegal memory access was encountered"


def after(
    made: Plan, error: str, gpus: tuple[Gpu, ...] = GPUS, rank: int = 1, rows: tuple[int, ...] = ()
) -> tuple[Plan, list[str]]:
    told: list[str] = []
    verdict = Verdict("raised", 1, (worker(rank, raised(rank, error)),), rows=rows)
    return next_plan(made, verdict, lambda _: Inventory(gpus, 8, ""), told.append), told


def made(**given: Any) -> Plan:
    return plan(**{"devices": DEVICES, **given})


@pytest.mark.parametrize(
    ("error", "gpus", "lost"),
    [
        (ECC, GPUS, 1),
        (BUG, (*GPUS[:2], replace(GPUS[2], problem="it has fallen off the bus")), 2),
        (BUG, GPUS[1:], 0),
    ],
)
def test_a_lost_device_is_left_out(error: str, gpus: tuple[Gpu, ...], lost: int) -> None:
    found, told = after(made(weights=(1.0, 2.0, 3.0)), error, gpus)
    assert found.devices == DEVICES[:lost] + DEVICES[lost + 1 :]
    assert len(found.weights) == found.workers == 2
    assert told == [f"GPU {lost} (RTX 3090) of rank {lost} is lost, and left out from now on"]


def test_one_device_that_is_left_is_single() -> None:
    given = made(devices=DEVICES[:2], weights=(1.0, 2.0), measures_rows=True)
    found, _ = after(given, ECC)
    assert (found.strategy, found.weights, found.measures_rows) == ("single", (), False)
    exact, _ = after(replace(given, strategy="exact", shares=8), ECC)
    assert (exact.strategy, exact.shares, exact.workers) == ("exact", 8, 1)


def test_a_rank_without_memory_gets_fewer_rows() -> None:
    given = made(measures_rows=True)
    found, told = after(given, MEMORY)
    assert found.weights == (1.0, 0.7, 1.0)
    assert told == ["memory ran out on rank 1: the next attempt begins with --rows 1.43:1:1.43"]
    assert after(found, MEMORY)[0].weights == (1.0, pytest.approx(0.49), 1.0)
    assert after(found, MEMORY, rows=(40, 20, 4))[0].weights == (40, 14, 4)  # shares as they were measured


def test_no_share_is_tried_of_which_the_error_tells_that_it_does_not_fit() -> None:
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 10.00 "
        "GiB of which 1024.00 MiB is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 1.00 GiB is "
        "reserved by PyTorch but unallocated."
    )
    assert part_to_try(said) == pytest.approx(0.6)
    assert (part_to_try(MEMORY), part_to_try(BUG)) == (0.7, 0.0)


@pytest.mark.parametrize(
    ("given", "error", "gpus"),
    [
        (made(), BUG, GPUS),
        (made(), BUG, ()),  # the driver does not answer
        (made(weights=(1.0, 2.0, 3.0)), MEMORY, GPUS),  # as the user has said
        (made(kind=Kind.DISTRIBUTED), ECC, GPUS),
        (made(devices=DEVICES[1:2]), ECC, GPUS),
        (made(measures_rows=True, machines=Machines(2, 0, "a", 1)), ECC, GPUS),
    ],
)
def test_else_nothing_changes(given: Plan, error: str, gpus: tuple[Gpu, ...]) -> None:
    assert after(given, error, gpus) == (given, [])
