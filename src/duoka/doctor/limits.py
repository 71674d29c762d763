"""What this process may use: cores, threads, memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from duoka import environment
from duoka.devices import cgroup, machine
from duoka.doctor.finding import Finding, Level

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED, LITTLE_MEMORY = GIB, 2 * GIB  # bytes
NO_SHARED = 16 << 20
FEW_FILES, TOO_FEW_FILES = 4096, 256


def examine() -> Iterator[Finding]:
    """Every limit."""
    here = machine.read()
    yield of_cores(here.cores, os.cpu_count() or 1)
    yield of_threads(environment.threads(), here.cores)
    yield of_memory(here.memory, here.used, cgroup.memory()[0] == here.memory)
    yield of_shared_memory(SHARED_MEMORY)
    yield of_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def of_cores(mine: int, all_of_them: int) -> Finding:
    """How many of the machine's cores may be used."""
    limited = f" of {all_of_them}; a container or an affinity holds back the others" if mine < all_of_them else ""
    return Finding("ok", "cores", f"{mine}{limited}")


def of_threads(omp: str | None, cores: int) -> Finding:
    """Whether OMP_NUM_THREADS fits the cores."""
    if omp is None:
        return Finding("ok", "threads", "OMP_NUM_THREADS is not set: `duoka run` shares the cores out")
    if not omp.isdigit() or int(omp) == 0:
        why, todo = "the libraries below torch may each take it for another number", "unset it, or write a number"
        return Finding("advice", "threads", f"OMP_NUM_THREADS={omp} is no number of threads", why, todo)
    if int(omp) > cores:
        return Finding(
            "advice",
            "threads",
            f"OMP_NUM_THREADS={omp} on {cores} cores",
            "threads wait for each other",
            "unset it: `duoka run` shares the cores out",
        )
    return Finding("ok", "threads", f"OMP_NUM_THREADS={omp} is respected")


def of_memory(total: int, used: int, limited: bool = False) -> Finding:
    """Whether there is memory to work in. limited: by a container."""
    container = ", the limit of this container," if limited else ""
    what = f"{(total - used) / GIB:.1f} of {total / GIB:.1f} GiB{container} are free"
    if total - used < LITTLE_MEMORY:
        return Finding("advice", "memory", what, "workers may be killed without a word", "end what is not needed")
    return Finding("ok", "memory", what)


def of_shared_memory(folder: Path) -> Finding:
    """Whether processes can hand each other batches."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        what = f"{folder}: {error.strerror}"
        why = "workers of a DataLoader and NCCL need it"
        return Finding("fault", "shared memory", what, why, "mount a tmpfs there; docker: --shm-size=8g")
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    if free < LITTLE_SHARED:
        what = f"{folder} has {size >> 20} MiB, of which {free >> 20} are free"
        why = "workers of a DataLoader die with a bus error when it is full"
        todo = "docker: --shm-size=8g, or --ipc=host; elsewhere remove what dead programs left there"
        return Finding("fault" if free < NO_SHARED else "advice", "shared memory", what, why, todo)
    return Finding("ok", "shared memory", f"{folder} has {size / GIB:.1f} GiB, of which {free / GIB:.1f} are free")


def of_files(limit: int) -> Finding:
    """Whether enough files can be open at a time."""
    if limit != resource.RLIM_INFINITY and limit < FEW_FILES:
        why = "each rank, each worker of a DataLoader and each tensor sent between them needs some"
        level: Level = "fault" if limit < TOO_FEW_FILES else "advice"
        return Finding(level, "open files", f"at most {limit}", why, "ulimit -n 65536")
    return Finding("ok", "open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")
