"""The state of each GPU, and the links between GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from duoka.doctor import Finding, advice, fault, ok
from duoka.hardware.allocation import read_with_holders
from duoka.hardware.choice import user_of
from duoka.hardware.gpu import Gpu
from duoka.hardware.vendors import nvidia
from duoka.hardware.vendors.nvidia import Link

HOT = 85  # °C; GPUs lower their clock rate from about here


def examine() -> Iterator[Finding]:
    """Check all GPUs and each pair of them."""
    for gpu in read_with_holders().gpus:
        yield check_card(gpu)
    yield from check_links(nvidia.links())


def check_card(gpu: Gpu) -> Finding:
    """Check that a GPU can train now: no fault, not used by others, not hot."""
    subject = f"GPU {gpu.index}"
    if gpu.problem:
        return fault(subject, gpu.problem, "nothing runs on it", "look into dmesg; often a restart helps")
    if gpu.is_split:
        return ok(subject, f"{gpu.name}, split into {len(gpu.parts)} parts (MIG), which work one at a time")
    if gpu.holder is not None or user_of(gpu):
        who = gpu.holder.command if gpu.holder is not None else user_of(gpu)
        return advice(subject, f"{gpu.name}: {who}", "two jobs on one GPU slow each other", "--devices free:N")
    if gpu.temperature is not None and gpu.temperature >= HOT:
        return advice(subject, f"{gpu.name}, {gpu.temperature}°C", "hot GPUs slow down", "check its cooling")
    return ok(subject, f"{gpu.name}, {gpu.memory / (1 << 30):.0f} GiB, free")


def check_links(links: Iterable[Link]) -> Iterator[Finding]:
    """Check that each pair of GPUs can access each other's memory directly (peer to peer)."""
    for link in links:
        subject = f"GPUs {link.first}-{link.second}"
        if link.nvlinks:
            yield ok(subject, f"{link.nvlinks} NVLinks")
        elif link.direct is False:
            yield advice(
                subject,
                "no direct access to each other's memory",
                "gradients go through the processor's memory, which is slower",
                "in virtual machines and with IOMMU on, ask who runs it for P2P",
            )
        else:
            yield ok(subject, "PCI, direct" if link.direct else "PCI")
