"""Versions of torch, CUDA, the driver, NCCL and gloo, and whether they are compatible."""

from __future__ import annotations

import platform
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from duoka.devices import inventory
from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory
from duoka.doctor.finding import Finding
from duoka.private.lookup import OLDEST_TORCH, numbers, untested

PCI = Path("/sys/bus/pci/devices")
TRIED: frozenset[str] = frozenset()  # names of GPUs on which `make gpu` has passed


def examine() -> Iterator[Finding]:
    """Check each version."""
    import torch
    from torch import distributed

    from duoka.private.torch import built_architectures
    from duoka.view.dispatch import engine

    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield check_torch(torch.__version__)
    yield check_engine(engine.built() is not None)
    machine = inventory.read()
    yield from check_driver(machine, len(nvidia_cards(PCI)))
    yield check_cuda(torch.version.cuda, machine, torch.version.hip)
    yield from check_tried(machine.gpus)
    if torch.version.cuda:
        yield from check_kernels(built_architectures(), machine.gpus)
    if not distributed.is_available() or not distributed.is_gloo_available():
        yield Finding(
            "fault",
            "gloo",
            "this build of torch has none",
            "ranks on CPUs cannot communicate",
            "install torch from PyPI",
        )
    else:
        yield Finding("ok", "gloo", "built into torch")
    if len(machine.gpus) > 1:
        yield _check_nccl()


def check_torch(version: str) -> Finding:
    """Check that this version of torch is supported."""
    if numbers(version) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return Finding(
            "fault", "torch", version, f"duoka needs {wanted} or newer", f"pip install --upgrade 'torch>={wanted}'"
        )
    for line in untested(version):
        return Finding(
            "advice", "torch", line, "parts of torch may have changed", "a newer duoka, where there is one"
        )
    return Finding("ok", "torch", version)


def check_engine(built: bool) -> Finding:
    """Check that the part of duoka that is written in C was built when duoka was installed."""
    if built:
        return Finding("ok", "engine", "in C")
    todo = "install a C compiler and Python's headers (Debian: gcc, python3-dev), and duoka again"
    return Finding("advice", "engine", "in Python", "models of many small functions take longer", todo)


def check_cuda(built: str | None, machine: Inventory, hip: str | None = None) -> Finding:
    """Check that the driver runs the CUDA version that torch was built for."""
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


def check_tried(gpus: Sequence[Gpu], tried: Container[str] = TRIED) -> Iterator[Finding]:
    """Name the GPUs on which duoka's tests have never run, and what other tests do not show of them."""
    names = sorted({gpu.name for gpu in gpus if gpu.name not in tried})
    if names:
        what = f"duoka's tests have not run on {', '.join(names)}, only on simulated GPUs"
        why = "never tried: NCCL, fused attention, cuDNN, how copies and kernels overlap"
        yield Finding("advice", "tests", what, why, "run `make gpu` in a clone of duoka, and report what fails")


def nvidia_cards(devices: Path) -> list[str]:
    """List the NVIDIA GPUs on the PCI bus, even without a driver."""
    found = []
    for device in devices.glob("*"):
        with suppress(OSError):
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == "0x10de" and kind.startswith("0x03"):
                found.append(device.name)
    return sorted(found)


def check_driver(machine: Inventory, cards: int) -> Iterator[Finding]:
    """Check that the driver responds if there are GPUs."""
    if machine.gpus:
        yield Finding("ok", "driver", f"{machine.driver}, for CUDA up to {machine.cuda or '?'}")
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
            yield Finding("fault", f"GPU {gpu.index}", what, "every operation on it will fail", todo)


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
        return Finding(
            "fault",
            "NCCL",
            "this build of torch has none",
            "GPUs cannot exchange gradients",
            "install torch for CUDA",
        )
    from torch.cuda import nccl

    return Finding("ok", "NCCL", ".".join(map(str, nccl.version())))
