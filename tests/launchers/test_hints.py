from __future__ import annotations

from dataclasses import replace

import pytest

from duoka.hardware.gpu import Device
from duoka.launchers.hints import hints
from duoka.planning.options import Machines
from duoka.planning.plan import Kind, Plan
from duoka.script import Target
from tests.forecasting.made import plan as planned

GPUS = (Device("cuda", 0), Device("cuda", 3))
TWO = replace(planned(GPUS), target=Target("pack.train", ("--name=a b",), is_module=True))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("MemoryError", "memory ran out"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "a smaller batch_size"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to", "memory ran out"),
        ("OSError: [Errno 24] Too many open files: 'a'", "ulimit -n"),
        ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode", "/dev/shm"),
        ("OSError: [Errno 28] No space left on device", "a disk is full, or /dev/shm is"),
        ("RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed.", "fewer DataLoader workers"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "--kind plain"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "must say gloo"),
        ("AssertionError: Torch not compiled with CUDA enabled", "--devices 0,1"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "`--devices cpu:2` names"),
    ],
)
def test_what_to_do_is_told(error: str, words: str) -> None:
    (line,) = hints(error, TWO)
    assert words in line


def test_nothing_is_told_of_other_errors() -> None:
    assert hints("ValueError: boom", TWO) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            TWO,
            "`duoka forecast --memory --devices 0,3 -m pack.train '--name=a b'` says what fits; "
            "--strategy fsdp needs less, and --strategy auto takes what fits",
        ),
        (replace(TWO, strategy="fsdp"), "says what fits; --checkpoint-activations or --cpu-offload needs less"),
        (replace(TWO, strategy="fsdp", checkpoint_activations=True), "says what fits; --cpu-offload needs less"),
        (
            replace(TWO, strategy="fsdp", checkpoint_activations=True, cpu_offload=True),
            "-m pack.train '--name=a b'` says what fits",
        ),
        (replace(TWO, kind=Kind.API), "run.model(net, strategy='fsdp') needs less than ddp on several devices"),
        (
            replace(
                TWO, strategy="hsdp", checkpoint_activations=True, cpu_offload=True, machines=Machines(2, 0, "a", 1)
            ),
            "`duoka forecast --memory --devices 0,3 --machines 2 -m pack.train '--name=a b'` says what fits",
        ),
        (
            replace(TWO, devices=TWO.devices[:1]),
            "`duoka forecast --memory -m pack.train '--name=a b'` says what fits",
        ),
        (replace(TWO, kind=Kind.DISTRIBUTED), "what helps: a smaller batch_size, more devices"),
        (replace(TWO, kind_reason="duoka.launch"), "a smaller batch_size (it counts all ranks), more devices"),
        (replace(TWO, target=Target("-")), "a smaller batch_size (it counts all ranks), more devices"),
    ],
)
def test_the_command_that_tells_what_fits(plan: Plan, words: str) -> None:
    (line,) = hints("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", plan)
    assert line.endswith(words)


def test_shares_are_named_where_they_are_uneven() -> None:
    (line,) = hints("MemoryError", TWO, fewer_rows="4.29:1")
    assert "what helps: fewer rows for this rank (--rows 4.29:1), a smaller batch_size" in line


@pytest.mark.parametrize(
    ("plan", "held", "which", "less"),
    [
        (
            TWO,
            (2 << 30, 2 << 30, 4 << 30, 20 << 30),
            "2 GiB of parameters, 2 GiB of gradients, 4 GiB of the optimizer's state, 12 GiB of activations",
            "--strategy fsdp needs less (4 GiB less on each), and",
        ),
        (
            replace(TWO, strategy="fsdp"),
            (1 << 20, 0, 0, 3 << 20),
            "1 MiB of parameters, 2 MiB of activations and others, before the optimizer had its state",
            "--cpu-offload (1 MiB less) needs less",
        ),
        (
            TWO,
            (1 << 20, 0, 2 << 20, 0),
            "1 MiB of parameters, 2 MiB of the optimizer's state",
            "1.5 MiB less on each",
        ),
    ],
)
def test_what_a_device_held_is_told(plan: Plan, held: tuple[int, ...], which: str, less: str) -> None:
    (line,) = hints("MemoryError", plan, held)
    assert f"this rank, which held {which}" in line
    assert less in line
