"""NVIDIA: whether the driver, torch's build for CUDA, its code and NCCL fit the cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from duoka.doctor import Finding, fault, ok
from duoka.hardware.gpu import Gpu
from duoka.hardware.inventory import Inventory
from duoka.hardware.vendors.report import on_bus


def examine(machine: Inventory) -> Iterator[Finding]:
    """Check the driver and torch's build."""
    import torch

    from duoka.private.torch import built_architectures

    yield from check_driver(machine, len(on_bus("0x10de")))
    yield check_cuda(torch.version.cuda, machine, torch.version.hip)
    if torch.version.cuda:
        yield from check_kernels(built_architectures(), machine.gpus)
    if len(machine.gpus) > 1:
        yield _check_nccl()


def check_cuda(built: str | None, machine: Inventory, hip: str | None = None) -> Finding:
    """Check that the driver runs the CUDA version that torch was built for."""
    if not machine.gpus:
        return ok("CUDA", f"not needed: {machine.no_gpus}")
    if built is None:
        build = "for ROCm" if hip else "without CUDA"
        what = f"torch was built {build}, and there are {len(machine.gpus)} NVIDIA GPUs"
        return fault("CUDA", what, "nothing will run on them", "install the build of torch for CUDA: pytorch.org")
    runs = machine.versions.get("CUDA", "")
    what = f"torch is built for CUDA {built}; driver {machine.versions.get('driver')} runs CUDA {runs or '?'}"
    if runs and int(runs.split(".")[0]) < int(built.split(".")[0]):
        return fault("CUDA", what, "CUDA will not start", "update the driver, or install torch for an older CUDA")
    return ok("CUDA", what)


def check_driver(machine: Inventory, cards: int) -> Iterator[Finding]:
    """Check that the driver responds if there are GPUs."""
    if machine.gpus:
        yield ok("driver", f"{machine.versions.get('driver')}, for CUDA up to {machine.versions.get('CUDA') or '?'}")
    elif cards:
        not_given = "Library Not Found" in machine.no_gpus  # as in a container without access to the GPUs
        what = f"{cards} NVIDIA card{'s' * (cards > 1)} on the PCI bus, and {machine.no_gpus}"
        todo = "install the driver; docker: --gpus all; after an update of the driver restart; nvidia-smi must work"
        yield Finding("advice" if not_given else "fault", "driver", what, "nothing will run on GPUs", todo)


def check_kernels(built: Sequence[str], gpus: Iterable[Gpu]) -> Iterator[Finding]:
    """Check that torch has code for each GPU: binary (sm_90) or translatable (compute_80)."""
    for gpu in gpus:
        if gpu.capability and not any(_runs(code, gpu.capability) for code in built):
            what = f"{gpu.name} has CUDA capability {gpu.capability}, and torch code for {' '.join(built)}"
            todo = "install a build of torch that has it (pytorch.org), or exclude the GPU"
            yield fault(f"GPU {gpu.index}", what, "every operation on it will fail", todo)


def _runs(code: str, capability: str) -> bool:
    match = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])[af]?", code)
    if match is None:
        return False
    major, minor = map(int, capability.split("."))
    built = int(match[2]), int(match[3])
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)


def _check_nccl() -> Finding:
    from torch import distributed

    if not distributed.is_nccl_available():
        return fault(
            "NCCL", "this build of torch has none", "GPUs cannot exchange gradients", "install torch for CUDA"
        )
    from torch.cuda import nccl

    return ok("NCCL", ".".join(map(str, nccl.version())))
