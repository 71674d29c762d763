"""Each card's state, and how the cards reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from duoka.devices import inventory, nvml
from duoka.devices.gpu import Gpu
from duoka.devices.locks import Locks
from duoka.devices.nvml import Link
from duoka.devices.pick import user_of
from duoka.devices.taking import marked
from duoka.doctor.finding import Finding

HOT = 85  # °C, where cards begin to slow down


def examine() -> Iterator[Finding]:
    """All cards, and each pair of them."""
    seen = inventory.read()
    with Locks() as locks:
        gpus = marked(seen, locks).gpus
    for gpu in gpus:
        yield of_card(gpu)
    yield from of_links(nvml.links())


def of_card(gpu: Gpu) -> Finding:
    """Whether a card can be trained on now."""
    subject = f"GPU {gpu.index}"
    if gpu.problem:
        return Finding("fault", subject, gpu.problem, "nothing runs on it", "look into dmesg; often a restart helps")
    if gpu.is_split:
        return Finding(
            "ok", subject, f"{gpu.name}, split into {len(gpu.parts)} parts (MIG), which work one at a time"
        )
    if gpu.holder is not None or user_of(gpu):
        who = gpu.holder.command if gpu.holder is not None else user_of(gpu)
        return Finding("advice", subject, f"{gpu.name}: {who}", "two on a card slow each other", "--devices free:N")
    if gpu.temperature is not None and gpu.temperature >= HOT:
        return Finding("advice", subject, f"{gpu.name}, {gpu.temperature}°C", "hot cards slow down", "see to its air")
    return Finding("ok", subject, f"{gpu.name}, {gpu.memory / (1 << 30):.0f} GiB, free")


def of_links(links: Iterable[Link]) -> Iterator[Finding]:
    """Whether each two cards read each other's memory without the processor."""
    for link in links:
        subject = f"GPUs {link.first}-{link.second}"
        if link.nvlinks:
            yield Finding("ok", subject, f"{link.nvlinks} NVLinks")
        elif link.direct is False:
            yield Finding(
                "advice",
                subject,
                "no direct access to each other's memory",
                "gradients go through the processor's memory, which is slower",
                "in virtual machines and with IOMMU on, ask who runs it for P2P",
            )
        else:
            yield Finding("ok", subject, "PCI, direct" if link.direct else "PCI")
