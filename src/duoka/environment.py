"""The environment variables that duoka reads and writes: all of them, and nowhere else.

Whatever is set here is seen by the calling process and by what it starts from then on. torch, CUDA and the
thread pools each look once, when they come up, so the worker sets what concerns them before that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duoka import libc
from duoka.devices import Device

KEPT_BYTES = 512 * 2**20  # of what is freed
LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 12_000  # below 32768, where those begin that the kernel gives away

# Who a process is and where it meets the others, as torchrun tells its workers.
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "DUOKA_RUN_ID",
)

# What Slurm, MPI, LSF and Kubernetes tell a process of its number, and of the others.
TASKS = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_STEP_NUM_TASKS",
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    *(f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "JOB_COMPLETION_INDEX",
    *(f"PET_{name}" for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")),
)


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place in a run: what tells it from the others.

    attempt: 0 at first, and one more each time the run is started again.
    restarts: how often that may be.
    port: of the launcher's store on `host`; 0 where it has none, and rank 0 opens one on any free port.
    machine: the number of this machine, out of `machines`.
    first: the rank of its first worker. here: how many it has; 0: all.
    file: the descriptor of the launcher's store, where that is a file without a name; None: it is at the port.
    """

    rank: int
    world_size: int
    attempt: int
    port: int
    run_id: str
    restarts: int = 0
    host: str = LOOPBACK
    machine: int = 0
    machines: int = 1
    first: int = 0
    here: int = 0
    file: int | None = None

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its machine."""
        return self.rank - self.first

    @property
    def local_world_size(self) -> int:
        """How many workers its machine has."""
        return self.here or self.world_size


def visible_cards() -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set; None where it is not."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def order_cards_by_bus() -> None:
    """Have CUDA, which has not looked yet, count cards as duoka and nvidia-smi do."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


def cards_are_ordered_by_bus() -> bool:
    """Whether CUDA was told to count cards as duoka and nvidia-smi do."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def threads() -> str | None:
    """OMP_NUM_THREADS as it is set; None where it is not."""
    return os.environ.get("OMP_NUM_THREADS")


def keep_freed_memory() -> None:
    """Keep what a step frees for the next one, unless the user has chosen how.

    The kernel would hand out the same pages in every step, and clear them each time.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if not chosen and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        libc.keep_freed_memory(KEPT_BYTES)


def fix_cublas_workspace() -> None:
    """Let cuBLAS compute the same each time, unless the user has chosen how."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def network_device() -> str | None:
    """The network device that gloo was told to use; None where it was not."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def variable(name: str) -> str | None:
    """A variable by which a launcher or a scheduler tells a process who it is; None where it is not set."""
    return os.environ.get(name) or None


def number(name: str) -> int | None:
    """The same, as a whole number; None where it is not set, or is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def master(port: int | None = None) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT (or `port`), where they are set."""
    address = variable("MASTER_ADDR")
    port = number("MASTER_PORT") or port
    return None if address is None or port is None else (address, port)


def port_of(job: int) -> int:
    """Where the ranks of a job meet that nobody has named a port for: all of them find the same by its number."""
    return _FIRST_PORT + job % _PORTS


def is_duokas_own(run: str | None) -> bool:
    """Whether TORCHELASTIC_RUN_ID was set by duoka, in a worker from which this process was started."""
    return run is not None and run == variable("DUOKA_RUN_ID")


def key() -> str | None:
    """The key that all commands of a run on several machines were given; None where they were not."""
    return variable("DUOKA_KEY")


def settings_folder() -> Path:
    """Where this user's settings of duoka are."""
    return Path(variable("XDG_CONFIG_HOME") or Path.home() / ".config") / "duoka"


def hide_key() -> None:
    """What a script starts, logs or sends has no need of the key of its run."""
    os.environ.pop("DUOKA_KEY", None)


def hide_ranks() -> None:
    """A plain script sees no rank and no rendezvous, not even one that duoka itself was started with."""
    for name in RANKS:
        os.environ.pop(name, None)


def hide_tasks() -> None:
    """Nor does it see that an engine has started it beside others, which libraries take for ranks."""
    for name in TASKS:
        os.environ.pop(name, None)


def leave_wandb_to_rank_0(rank: int) -> None:
    """A plain script that logs to W&B has one run there, and not one for each rank."""
    if rank > 0:
        os.environ["WANDB_MODE"] = "disabled"


def give_ranks(place: Place) -> None:
    """A script that does its own torch.distributed sees what torchrun would tell it, and nothing stale."""
    hide_ranks()
    rank, size = str(place.rank), str(place.world_size)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=str(place.local_rank),
        GROUP_RANK=str(place.machine),
        ROLE_RANK=rank,
        ROLE_NAME="default",
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        GROUP_WORLD_SIZE=str(place.machines),
        ROLE_WORLD_SIZE=size,
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
        TORCHELASTIC_RUN_ID=place.run_id,
        DUOKA_RUN_ID=place.run_id,
        TORCHELASTIC_RESTART_COUNT=str(place.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(place.restarts),
        TORCHELASTIC_USE_AGENT_STORE=str(place.port != 0),
    )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


def show_cards(devices: Sequence[Device]) -> None:
    """Let this process see these GPUs alone, in this order; none, if they are CPUs.

    CUDA looks when it is first used, so this comes before that. Devices of other types are not hidden so.
    """
    if devices[0].type == "cuda":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        names = (str(device.index) if device.part is None else device.uuid for device in devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    elif devices[0].type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def give_threads(count: int | None) -> None:
    """Tell the thread pools of torch, numpy and their libraries how large to be; None leaves it to them.

    They look when they are imported. MKL_NUM_THREADS and its like, where the user set them, still win.
    """
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


def keep_gloo_here() -> None:
    """Let gloo talk over the loopback device, whatever this machine's name resolves to.

    Workers of one machine then find each other without a network, and no port of theirs is open to others.
    """
    lead_gloo("lo")


def lead_gloo(device: str) -> None:
    """Let gloo talk over this network device, unless the user has chosen one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", device)


def hashes_differ() -> bool:
    """Whether Python hashes a text differently in every process that it is started in."""
    return not os.environ.get("PYTHONHASHSEED", "").isdecimal()


def fix_hashes() -> None:
    """Let Python, when it is started again, hash texts as on every machine: sets are gone through in that order."""
    os.environ["PYTHONHASHSEED"] = "0"


def seed_hashes(entropy: int) -> None:
    """Let the programs in Python that all ranks start hash texts alike, unless the user says how."""
    os.environ.setdefault("PYTHONHASHSEED", str(entropy % 2**32))


def record_flights() -> None:
    """Have torch's flight recorder keep the last collectives, on gloo too, unless the user says how many.

    Reading them takes 30 us each, with the interpreter's lock held.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")


def breakpoint_hook() -> str | None:
    """PYTHONBREAKPOINT as it is set; None where it is not."""
    return os.environ.get("PYTHONBREAKPOINT") or None


def keep_trackers_quiet() -> None:
    """Let trackers of experiments send nothing: a script that is only looked at is no experiment."""
    os.environ["WANDB_MODE"] = "disabled"
