"""The time of an all-reduce between the devices, compared with what their link should give.

Separate processes measure it (`python -m duoka.doctor.all_reduce cpu`), which may hang or die without harm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from duoka.doctor import Finding, advice, fault, ok
from duoka.hardware.allocation import read_with_holders
from duoka.hardware.choice import user_of
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.vendors import SHOWS_TRANSPORT, nvidia, variables_for
from duoka.system import environment
from duoka.system.libc import die_with

LIMIT = 90.0  # seconds for the whole measurement
LARGE, LARGE_ON_GPU = 16 << 20, 256 << 20  # bytes of the tensor used to measure bandwidth
NVLINK = 25.0  # GB/s of one link in one direction
PCI = 12.0  # GB/s that GPUs on PCIe 4.0 reach easily
PART = 0.3  # fraction of the link's rate that is good enough: an all-reduce also adds
COPIES = 50  # gloo copies and adds; a 50th of the rate of a memory copy is good enough
SLOW_ANSWER = 5e-3  # seconds


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """Measurements of all-reduce."""

    backend: str
    ranks: int
    latency: float  # seconds for one number
    bandwidth: float  # GB/s through one device
    copying: float  # GB/s of a memory copy in a process


def examine() -> Iterator[Finding]:
    """Measure once: between all unused GPUs, or between two processes on the CPU if fewer than two are unused."""
    seen = read_with_holders()
    gpus = free(seen.gpus)
    kind = seen.vendor_module.TYPE if len(gpus) > 1 else "cpu"
    words = [sys.executable, "-m", "duoka.doctor.all_reduce", kind, *(gpu.number for gpu in gpus)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        yield _broken(kind, f"not finished in {LIMIT:g} s")
        return
    if done.returncode != 0:
        yield _broken(kind, (done.stderr.strip().splitlines() or ["no message"])[-1])
        return
    measured = AllReduceTimes(**json.loads(done.stdout.splitlines()[-1]))
    measured_ones = {gpu.index for gpu in gpus}
    links = [link for link in nvidia.links() if {link.first, link.second} <= measured_ones]
    yield judge(measured, min((link.nvlinks for link in links), default=0))


def free(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Select unused GPUs: other work would distort the measurement, and be slowed by it."""
    fit = [gpu for gpu in gpus if not (gpu.problem or gpu.is_split)]
    return [gpu for gpu in fit if gpu.holder is None and not user_of(gpu)]


def judge(measured: AllReduceTimes, nvlinks: int) -> Finding:
    """Compare measured latency and bandwidth with what the link should give."""
    if measured.backend == "gloo":
        should, link = measured.copying / COPIES, f"memory copies {measured.copying:.1f} GB/s"
    else:
        should = PART * (nvlinks * NVLINK or PCI)
        link = f"{nvlinks} NVLinks" if nvlinks else "PCI"
    subject = f"all-reduce ({measured.backend})"
    size = LARGE if measured.backend == "gloo" else LARGE_ON_GPU
    what = (
        f"{measured.ranks} ranks: {measured.latency * 1e6:.0f} µs for one number, {measured.bandwidth:.2f} GB/s for "
        f"{size >> 20} MiB; {link}, so at least {should:.2f} GB/s is expected"
    )
    if measured.bandwidth < should or measured.latency > SLOW_ANSWER:
        todo = "end other programs here and try again; in a container check its CPU limit"
        if measured.backend != "gloo":
            todo = SHOWS_TRANSPORT.get(measured.backend, f"see the log of {measured.backend}")
        return advice(subject, what, "gradients are exchanged at every step", todo)
    return ok(subject, what)


def _broken(kind: str, what: str) -> Finding:
    todo = "try --devices with one device; TORCH_CPP_LOG_LEVEL=INFO says more"
    return fault(f"all-reduce ({kind})", what, "runs on several devices will not work", todo)


def measure(kind: str, cards: Sequence[int]) -> None:
    """Fork the ranks, of which rank 0 prints the measurements as JSON. If one fails, the others are ended."""
    import torch.distributed  # noqa: F401  # imported once, before the fork
    from torch.multiprocessing.spawn import start_processes

    devices = [Device("cpu")] * 2 if kind == "cpu" else [Device(kind, card) for card in cards]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (devices, f"{folder}/store", os.getpid()), len(devices), start_method="fork")


def _rank(rank: int, devices: Sequence[Device], store: str, parent: int) -> None:
    die_with(parent)
    environment.set_variables(variables_for([devices[rank]]))
    import torch
    from torch import distributed

    environment.set_gloo_device()
    torch.set_num_threads(1)  # two ranks on the CPU must not compete for its cores
    where, ranks = torch.device(devices[rank].type), len(devices)
    backend, large = distributed.get_default_backend_for_device(where), LARGE if where.type == "cpu" else LARGE_ON_GPU
    limit = timedelta(seconds=LIMIT)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    latency = _seconds(torch.zeros(1, device=where), 100)
    seconds = _seconds(torch.zeros(large // 4, device=where), 5)
    if rank == 0:
        bandwidth = 2 * (ranks - 1) / ranks * large / seconds / 1e9  # what each rank of a ring sends
        print(json.dumps(asdict(AllReduceTimes(backend, ranks, latency, bandwidth, _copying()))), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def _seconds(tensor: Any, rounds: int) -> float:
    """Return the median time of one all-reduce."""
    import torch
    from torch import distributed

    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        distributed.all_reduce(tensor)
        if not tensor.is_cpu:
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])  # in the first ones, connections are made


def _copying() -> float:
    """Return the rate of a memory copy in GB/s."""
    import torch

    source = torch.zeros(LARGE, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return LARGE / min(times) / 1e9


if __name__ == "__main__":
    measure(sys.argv[1], [int(card) for card in sys.argv[2:]])
