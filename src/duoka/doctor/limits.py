"""Limits of this process: cores, threads, memory, shared memory, open files; free space where a run writes."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from duoka.doctor import Finding, Level, advice, fault, ok
from duoka.hardware import machine
from duoka.system import environment

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED, LITTLE_MEMORY = GIB, 2 * GIB  # bytes
NO_SHARED = 16 << 20
FEW_FILES, TOO_FEW_FILES = 4096, 256
NO_SPACE, LITTLE_SPACE = GIB // 10, 10 * GIB  # bytes


def examine() -> Iterator[Finding]:
    """Check every limit."""
    here = machine.read()
    yield check_cores(here.cores, os.cpu_count() or 1)
    yield check_threads(environment.threads(), here.cores)
    yield check_memory(here.memory, here.used, machine.memory_limit()[0] == here.memory)
    yield check_shared_memory(SHARED_MEMORY)
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def check_cores(mine: int, all_of_them: int) -> Finding:
    """Report how many of the machine's cores this process may use."""
    limited = f" of {all_of_them}; a container or CPU affinity excludes the others" if mine < all_of_them else ""
    return ok("cores", f"{mine}{limited}")


def check_threads(omp: str | None, cores: int) -> Finding:
    """Check that OMP_NUM_THREADS, if set, is a number no greater than the number of cores."""
    if omp is None:
        return ok("threads", "OMP_NUM_THREADS is not set: `duoka run` divides the cores among workers")
    if not omp.isdigit() or int(omp) == 0:
        why, todo = "the libraries that torch uses may each read it differently", "unset it, or set a number"
        return advice("threads", f"OMP_NUM_THREADS={omp} is not a number of threads", why, todo)
    if int(omp) > cores:
        return advice(
            "threads",
            f"OMP_NUM_THREADS={omp} on {cores} cores",
            "more threads than cores slow each other",
            "unset it: `duoka run` divides the cores among workers",
        )
    return ok("threads", f"OMP_NUM_THREADS={omp} is respected")


def check_memory(total: int, used: int, limited: bool = False) -> Finding:
    """Check free memory. total, used: bytes. limited: by a container."""
    container = ", the limit of this container," if limited else ""
    what = f"{(total - used) / GIB:.1f} of {total / GIB:.1f} GiB{container} are free"
    if total - used < LITTLE_MEMORY:
        return advice(
            "memory", what, "the system may kill workers without a message", "end programs that are not needed"
        )
    return ok("memory", what)


def check_shared_memory(folder: Path) -> Finding:
    """Check that processes can exchange batches through shared memory."""
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        what = f"{folder}: {error.strerror}"
        why = "workers of a DataLoader and collectives of GPUs need it"
        return fault("shared memory", what, why, "mount a tmpfs there; docker: --shm-size=8g")
    size, free = usage.f_frsize * usage.f_blocks, usage.f_frsize * usage.f_bavail
    if free < LITTLE_SHARED:
        what = f"{folder} has {size >> 20} MiB, of which {free >> 20} are free"
        why = "workers of a DataLoader die with a bus error when it is full"
        todo = "docker: --shm-size=8g, or --ipc=host; elsewhere remove files left by dead programs"
        return Finding("fault" if free < NO_SHARED else "advice", "shared memory", what, why, todo)
    return ok("shared memory", f"{folder} has {size / GIB:.1f} GiB, of which {free / GIB:.1f} are free")


def check_files(limit: int) -> Finding:
    """Check the limit on open files."""
    if limit != resource.RLIM_INFINITY and limit < FEW_FILES:
        why = "each rank, each worker of a DataLoader and each tensor sent between them needs some"
        level: Level = "fault" if limit < TOO_FEW_FILES else "advice"
        return Finding(level, "open files", f"at most {limit}", why, "ulimit -n 65536")
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit:,}")


def examine_disks() -> Iterator[Finding]:
    """Check the working directory, and the directory for temporary files if it is on another disk."""
    seen: set[int] = set()
    for subject, folder in (("disk here", os.getcwd()), ("disk for temporary files", tempfile.gettempdir())):
        device = os.stat(folder).st_dev
        if device not in seen:
            seen.add(device)
            usage = os.statvfs(folder)
            no_files = usage.f_files > 0 and usage.f_favail == 0  # some file systems report 0 inodes in total
            yield check_folder(subject, folder, usage.f_frsize * usage.f_bavail, os.access(folder, os.W_OK), no_files)


def check_folder(subject: str, folder: str, free: int, writable: bool, no_files: bool = False) -> Finding:
    """Check that checkpoints and logs fit. free: bytes. no_files: the file system has no free inodes."""
    what = f"{folder}: {free / GIB:.1f} GiB are free"
    if not writable:
        return fault(subject, f"{folder} cannot be written to", "nothing can be saved", "run elsewhere")
    if no_files:
        what = f"{folder}: {free / GIB:.1f} GiB are free, but no inodes are free, so no file can be created"
        return fault(subject, what, "checkpoints and logs are files", "remove small files; see df -i")
    if free < NO_SPACE:
        return fault(subject, what, "checkpoints and logs will not fit", "make room")
    if free < LITTLE_SPACE:
        return advice(subject, what, "checkpoints of a large model will not fit", "make room")
    return ok(subject, what)
