"""This host: its cards and their links; limits of a process and free space; its name, network devices and clock.

Limits are those of a run here, and names and clocks are causes of hangs on several machines.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from duoka.doctor import Finding, Level, advice, fault, ok
from duoka.hardware import machine
from duoka.hardware.allocation import read_with_holders
from duoka.hardware.choice import user_of
from duoka.hardware.gpu import Gpu
from duoka.hardware.vendors import nvidia
from duoka.hardware.vendors.nvidia import Link
from duoka.system import environment, libc
from duoka.system.time_limit import within

HOT = 85  # °C; GPUs lower their clock rate from about here
GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED, LITTLE_MEMORY = GIB, 2 * GIB  # bytes
NO_SHARED = 16 << 20
FEW_FILES, TOO_FEW_FILES = 4096, 256
NO_SPACE, LITTLE_SPACE = GIB // 10, 10 * GIB  # bytes
RESOLVE_LIMIT = 5.0  # seconds
SLOW = 1.0  # seconds


# Cards.


def examine_cards() -> Iterator[Finding]:
    """Check all GPUs and each pair of them."""
    for gpu in read_with_holders().gpus:
        yield check_card(gpu)
    yield from check_links(nvidia.links())


def check_card(gpu: Gpu) -> Finding:
    """Check that a GPU can train now: no fault, not used by others, not hot."""
    subject = f"GPU {gpu.index}"
    if gpu.problem:
        return fault(subject, gpu.problem, "nothing runs on it", "look into dmesg; often a restart helps")
    if gpu.is_split:
        return ok(subject, f"{gpu.name}, split into {len(gpu.parts)} parts (MIG), which work one at a time")
    if gpu.holder is not None or user_of(gpu):
        who = gpu.holder.command if gpu.holder is not None else user_of(gpu)
        return advice(subject, f"{gpu.name}: {who}", "two jobs on one GPU slow each other", "--devices free:N")
    if gpu.temperature is not None and gpu.temperature >= HOT:
        return advice(subject, f"{gpu.name}, {gpu.temperature}°C", "hot GPUs slow down", "check its cooling")
    return ok(subject, f"{gpu.name}, {gpu.memory / (1 << 30):.0f} GiB, free")


def check_links(links: Iterable[Link]) -> Iterator[Finding]:
    """Check that each pair of GPUs can access each other's memory directly (peer to peer)."""
    for link in links:
        subject = f"GPUs {link.first}-{link.second}"
        if link.nvlinks:
            yield ok(subject, f"{link.nvlinks} NVLinks")
        elif link.direct is False:
            yield advice(
                subject,
                "no direct access to each other's memory",
                "gradients go through the processor's memory, which is slower",
                "in virtual machines and with IOMMU on, ask who runs it for P2P",
            )
        else:
            yield ok(subject, "PCI, direct" if link.direct else "PCI")


# Limits and disks.


def examine_limits() -> Iterator[Finding]:
    """Check cores, threads, memory, shared memory and open files of this process."""
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
            usage = os.statvfs(folder)  # f_bavail, below: what is not reserved for root
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


# Names, network devices and the clock.


def examine_network() -> Iterator[Finding]:
    """Check this machine's name, network devices and clock."""
    yield check_host_name(socket.gethostname(), _resolve)
    yield check_localhost(_resolve)
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable, value in environment.ending_in("SOCKET_IFNAME"):  # of gloo, and of vendors' collectives
        yield from check_interface(variable, value, interfaces)
    yield check_clock(time.time(), Path(__file__).stat().st_mtime, libc.clock_is_synchronised())


def check_host_name(name: str, resolve: Callable[[str], list[str]]) -> Finding:
    """Check that the machine's own name resolves to an address that other machines can reach."""
    begin = time.monotonic()
    addresses = _in_time(lambda: resolve(name))
    seconds = time.monotonic() - begin
    why = "machines of one job connect by name; jobs on one machine are not affected"
    todo = "add it to /etc/hosts, or give the master's IP address"
    if addresses is None:
        return advice("host name", f"{name} cannot be resolved (within {RESOLVE_LIMIT:g} s)", why, todo)
    what = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return advice("host name", f"{what}, which no other machine can reach", why, todo)
    if seconds > SLOW:
        return advice("host name", f"{what}, found after {seconds:.1f} s", why, "see /etc/resolv.conf")
    device = environment.variable("GLOO_SOCKET_IFNAME")
    return ok("host name", f"{what}{f'; gloo uses {device}' if device else ''}")


def check_localhost(resolve: Callable[[str], list[str]]) -> Finding:
    """Check that `localhost` resolves to this machine, as launchers assume."""
    addresses = _in_time(lambda: resolve("localhost"))
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        return ok("localhost", ", ".join(addresses))
    what = f"it is {', '.join(addresses)}" if addresses else f"it cannot be resolved (within {RESOLVE_LIMIT:g} s)"
    todo = "put `127.0.0.1 localhost` into /etc/hosts"
    return fault("localhost", what, "torchrun and MASTER_ADDR=localhost cannot connect", todo)


def check_interface(variable: str, names: str, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Check that the network devices named in a variable exist. A name may be a prefix."""
    if names.startswith("^"):  # all devices except these
        return
    asked = [name.partition(":")[0] for name in names.lstrip("=").split(",")]
    if not any(there.startswith(name) for name in asked for there in interfaces):
        what = f"{variable}={names}, but this machine has {', '.join(interfaces)}"
        why, todo = "ranks cannot connect", f"unset {variable}, or correct it"
        yield fault("network device", what, why, todo)


def check_clock(now: float, installed: float, synchronised: bool | None) -> Finding:
    """Check the clock: not before the installation of duoka, and synchronised if the kernel says so."""
    why = "several machines compare times, and certificates are not valid yet"
    if now < installed:
        return fault("clock", "it is before duoka was installed", why, "set the clock; run chrony or ntpd")
    if synchronised is False:
        return advice("clock", "the kernel says it is not synchronised", why, "run chrony or ntpd")
    return ok("clock", "synchronised" if synchronised else "plausible")


def _resolve(name: str) -> list[str]:
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})


def _in_time(ask: Callable[[], list[str]]) -> list[str] | None:
    """Resolve a name within the time limit; None if that fails: a silent name server blocks for long."""
    try:
        return within(RESOLVE_LIMIT, ask)
    except OSError:  # TimeoutError is an OSError
        return None
