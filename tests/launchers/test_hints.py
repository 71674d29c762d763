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
            "`duoka forecast --memory --devices 0,3 -m pack.train '--name=a b'` says what fits, "
            "and --strategy auto takes it",
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
    (line,) = hints("MemoryError", TWO, "4.29:1")
    assert "what helps: fewer rows for this rank (--rows 4.29:1), a smaller batch_size" in line
