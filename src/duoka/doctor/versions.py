"""Versions of torch, gloo and the driver, and whether they are compatible; `nvidia.py` has NVIDIA's own."""

from __future__ import annotations

import platform
from collections.abc import Container, Iterator, Sequence

from duoka.doctor import Finding, advice, fault, nvidia, ok
from duoka.hardware import inventory
from duoka.hardware.gpu import Gpu
from duoka.hardware.inventory import Inventory
from duoka.private import OLDEST_TORCH, numbers, untested

TRIED: frozenset[str] = frozenset()  # names of GPUs on which `make gpu` has passed


def examine() -> Iterator[Finding]:
    """Check each version."""
    import torch
    from torch import distributed

    from duoka.view.dispatch import native

    yield ok("python", f"{platform.python_version()} on {platform.platform()}")
    yield check_torch(torch.__version__)
    yield check_engine(native.built() is not None)
    machine = inventory.read()
    yield from nvidia.examine(machine) if machine.vendor == "NVIDIA" else check_vendor(machine)
    yield from check_tried(machine.gpus)
    if not distributed.is_available() or not distributed.is_gloo_available():
        yield fault(
            "gloo", "this build of torch has none", "ranks on CPUs cannot communicate", "install torch from PyPI"
        )
    else:
        yield ok("gloo", "built into torch")


def check_torch(version: str) -> Finding:
    """Check that this version of torch is supported."""
    if numbers(version) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return fault("torch", version, f"duoka needs {wanted} or newer", f"pip install --upgrade 'torch>={wanted}'")
    for line in untested(version):
        return advice("torch", line, "parts of torch may have changed", "a newer duoka, where there is one")
    return ok("torch", version)


def check_engine(built: bool) -> Finding:
    """Check that the part of duoka that is written in C was built when duoka was installed."""
    if built:
        return ok("engine", "in C")
    todo = "install a C compiler and Python's headers (Debian: gcc, python3-dev), and duoka again"
    return advice("engine", "in Python", "models of many small functions take longer", todo)


def check_vendor(machine: Inventory) -> Iterator[Finding]:
    """Check that torch can use the GPUs, and that several can exchange gradients."""
    import torch
    from torch.distributed import get_default_backend_for_device

    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    yield ok("driver", versions or f"of {machine.vendor}")
    if machine.lacking or not torch.accelerator.is_available():
        what = machine.lacking or f"torch sees none of {len(machine.gpus)} {machine.vendor} GPUs"
        yield fault(machine.vendor, what, "nothing will run on them", "install torch as the vendor says")
    elif len(machine.gpus) > 1:
        yield ok("collectives", get_default_backend_for_device(machine.vendor_module.TYPE))


def check_tried(gpus: Sequence[Gpu], tried: Container[str] = TRIED) -> Iterator[Finding]:
    """Name the GPUs on which duoka's tests have never run, and what other tests do not show of them."""
    names = sorted({gpu.name for gpu in gpus if gpu.name not in tried})
    if names:
        what = f"duoka's tests have not run on {', '.join(names)}, only on simulated GPUs"
        why = "not shown by those: collectives, fused attention, fused recurrent nets, how copies and kernels overlap"
        yield advice("tests", what, why, "run `make gpu` in a clone of duoka, and report what fails")
