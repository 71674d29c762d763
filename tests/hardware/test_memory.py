from __future__ import annotations

from duoka.hardware import machine
from duoka.hardware.choice import memory_of_each
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory

SEEN = Inventory(tuple(Gpu(index, f"GPU-{index}", "H200", size) for index, size in enumerate((2**37, 2**36))))
CARDS = [Device("cuda", index, "H200", f"GPU-{index}") for index in range(2)]


def test_the_smallest_card_counts() -> None:
    assert memory_of_each(CARDS, SEEN) == 2**36
    assert memory_of_each(CARDS[:1], SEEN) == 2**37


def test_cpu_workers_divide_what_is_free() -> None:
    alone, two = (memory_of_each([Device("cpu")] * count, SEEN) for count in (1, 2))
    assert alone is not None
    assert two is not None
    assert 0 < alone <= machine.read().memory
    assert 0.5 < 2 * two / alone < 2  # others use the machine meanwhile


def test_a_device_of_which_nothing_is_known() -> None:
    assert memory_of_each([Device("xpu", 0)], SEEN) is None
