"""torch, CUDA, the driver, NCCL and gloo, and whether they fit together."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from duoka.devices import inventory
from duoka.devices.inventory import Inventory
from duoka.doctor.finding import Finding

OLDEST_TORCH = (2, 10)


def examine() -> Iterator[Finding]:
    """What is installed."""
    import torch
    from torch import distributed

    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield of_torch(torch.__version__)
    machine = inventory.read()
    yield of_cuda(torch.version.cuda, machine, torch.version.hip)
    if not distributed.is_available() or not distributed.is_gloo_available():
        yield Finding(
            "fault", "gloo", "this build of torch has none", "ranks on CPUs cannot talk", "install torch from PyPI"
        )
    else:
        yield Finding("ok", "gloo", "built into torch")
    if len(machine.gpus) > 1:
        yield _of_nccl()


def of_torch(version: str) -> Finding:
    """Whether a version of torch is new enough."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return Finding(
            "fault", "torch", version, f"duoka needs {wanted} or newer", f"pip install --upgrade 'torch>={wanted}'"
        )
    return Finding("ok", "torch", version)


def of_cuda(built: str | None, machine: Inventory, hip: str | None = None) -> Finding:
    """Whether the CUDA that torch was built for runs on this driver."""
    if not machine.gpus:
        return Finding("ok", "CUDA", f"not needed: {machine.no_gpus}")
    if built is None:
        build = "for ROCm" if hip else "without CUDA"
        what = f"torch was built {build}, and there are {len(machine.gpus)} NVIDIA GPUs"
        return Finding(
            "fault", "CUDA", what, "nothing will run on them", "install the build of torch for CUDA: pytorch.org"
        )
    what = f"torch is built for CUDA {built}; driver {machine.driver} runs CUDA {machine.cuda or '?'}"
    if machine.cuda and int(machine.cuda.split(".")[0]) < int(built.split(".")[0]):
        return Finding(
            "fault", "CUDA", what, "CUDA will not start", "update the driver, or install torch for an older CUDA"
        )
    return Finding("ok", "CUDA", what)


def _of_nccl() -> Finding:
    from torch import distributed

    if not distributed.is_nccl_available():
        return Finding(
            "fault",
            "NCCL",
            "this build of torch has none",
            "GPUs cannot exchange gradients",
            "install torch for CUDA",
        )
    from torch.cuda import nccl

    return Finding("ok", "NCCL", ".".join(map(str, nccl.version())))
