from __future__ import annotations

import pytest

from duoka.launchers.hints import hints


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
    (line,) = hints(error)
    assert words in line


def test_nothing_is_told_of_other_errors() -> None:
    assert hints("ValueError: boom") == []
