"""The environment variables that duoka reads and writes: no other module accesses os.environ.

Variables set here affect this process and the processes that it starts later. torch, drivers and thread pools read
theirs once, at their start, so a worker sets those before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from duoka.system import libc

KEPT_BYTES = 512 * 2**20  # of freed memory
LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 12_000  # below 32768, where the kernel's ephemeral ports begin

# Rank and rendezvous variables, as torchrun sets them for its workers.
RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "DUOKA_RUN_ID"),
    *(
        f"TORCHELASTIC_{name}"
        for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE", "ERROR_FILE")
    ),
)

# Rank variables of Slurm, MPI, LSF and Kubernetes.
TASKS = (
    *(f"SLURM_{name}" for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "STEP_NUM_TASKS")),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "JOB_COMPLETION_INDEX",
    *(f"PET_{name}" for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")),
)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of one worker, and what it needs to find the others."""

    rank: int
    world_size: int
    attempt: int  # 0 at first, and one more after each restart
    port: int  # of the launcher's store on `host`; 0 without one: rank 0 opens one on any free port
    run_id: str
    restarts: int = 0  # number of restarts allowed
    host: str = LOOPBACK
    machine: int = 0  # number of this machine
    machines: int = 1
    first: int = 0  # the rank of the machine's first worker
    here: int = 0  # number of its workers; 0: all
    file: int | None = None  # descriptor of the launcher's store, if that is an unnamed file; None: it is at the port

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its machine."""
        return self.rank - self.first

    @property
    def local_world_size(self) -> int:
        """Number of workers of its machine."""
        return self.here or self.world_size


def first_set(names: Iterable[str]) -> str | None:
    """Return the value of the first of these variables that is set, be it empty; None if none is."""
    return next((os.environ[name] for name in names if name in os.environ), None)


def ending_in(suffix: str) -> list[tuple[str, str]]:
    """Return the variables whose names end so, and their values."""
    return sorted((name, value) for name, value in os.environ.items() if name.endswith(suffix))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process: those that hide GPUs, before their runtime has started."""
    os.environ.update(variables)


def threads() -> str | None:
    """Return OMP_NUM_THREADS; None if it is not set."""
    return os.environ.get("OMP_NUM_THREADS")


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for the next step, unless the user has set malloc's options.

    Otherwise the kernel would hand out and clear the same pages in every step.
    """
    # mallopt in this process would take precedence over both ways of setting them.
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if not chosen and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        libc.keep_freed_memory(KEPT_BYTES)


def variable(name: str) -> str | None:
    """Return a variable set by the user, a launcher or a scheduler; None if it is not set or empty."""
    return os.environ.get(name) or None


def number(name: str) -> int | None:
    """Return a variable as a whole number; None if it is not set or not one."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def master(port: int | None = None) -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT (or `port`); None if one is not set."""
    address = variable("MASTER_ADDR")
    port = number("MASTER_PORT") or port
    return None if address is None or port is None else (address, port)


def port_of(job: int) -> int:
    """Return a port for a job without one, derived from its number and so the same on all machines."""
    return _FIRST_PORT + job % _PORTS


def is_duokas_own(run: str | None) -> bool:
    """Return whether TORCHELASTIC_RUN_ID was set by duoka, in a worker that has started this process."""
    return run is not None and run == variable("DUOKA_RUN_ID")


def inherited(others: dict[str, str]) -> dict[str, str]:
    """Return this process's variables and `others`, for a process to be started."""
    return {**os.environ, **others}


def starter() -> int | None:
    """Return and unset DUOKA_STARTED_BY: the pid of the process with which this command must end; None if not set."""
    pid = number("DUOKA_STARTED_BY")
    os.environ.pop("DUOKA_STARTED_BY", None)
    return pid


def set_default(name: str, value: str) -> None:
    """Set a variable, unless the user has set it."""
    os.environ.setdefault(name, value)


def unset(names: Iterable[str]) -> None:
    """Unset variables, of which some may not be set."""
    for name in names:
        os.environ.pop(name, None)


def disable_wandb_except_on_rank_0(rank: int) -> None:
    """Disable W&B on other ranks, so that a plain script makes one W&B run."""
    if rank > 0:
        os.environ["WANDB_MODE"] = "disabled"


def set_rank_variables(info: RankInfo) -> None:
    """Set the variables that torchrun would set, and unset stale ones."""
    unset(RANKS)  # those of a launcher around this one, such as TORCHELASTIC_ERROR_FILE
    rank, size = str(info.rank), str(info.world_size)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=str(info.local_rank),
        GROUP_RANK=str(info.machine),
        ROLE_RANK=rank,
        ROLE_NAME="default",
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        GROUP_WORLD_SIZE=str(info.machines),
        ROLE_WORLD_SIZE=size,
        MASTER_ADDR=info.host,
        MASTER_PORT=str(info.port),
        TORCHELASTIC_RUN_ID=info.run_id,
        DUOKA_RUN_ID=info.run_id,
        TORCHELASTIC_RESTART_COUNT=str(info.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(info.restarts),
        TORCHELASTIC_USE_AGENT_STORE=str(info.port != 0),  # True: torch's env:// opens no store on rank 0
    )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does


def set_pool_sizes(count: int | None) -> None:
    """Set the number of threads of torch, numpy and their libraries; None keeps their defaults.

    They read it when imported. MKL_NUM_THREADS and the like, if set by the user, take precedence.
    """
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


def set_gloo_device(device: str = "lo") -> None:
    """Let gloo use this network interface, unless the user has chosen one.

    With loopback, workers of one machine need no network, and open no port to others.
    """
    set_default("GLOO_SOCKET_IFNAME", device)


def fix_hash_seed() -> bool:
    """Fix Python's hash seed for processes started later, so that sets have the same order everywhere.

    Returns whether that was needed: strings are hashed differently in each process, this one included.
    """
    is_random = number("PYTHONHASHSEED") is None
    if is_random:
        os.environ["PYTHONHASHSEED"] = "0"
    return is_random
