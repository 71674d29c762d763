"""Find out by which job launcher this process was started, from the variables that this has set.

torchrun     RANK, LOCAL_RANK, WORLD_SIZE; also launchers that set the same, as Ray Train
MPI          mpirun, mpiexec
Slurm        srun
LSF          jsrun
Kubernetes   an Indexed Job, a JobSet, Kubeflow

A command started by one is task number `rank` of `count` of one run (`Task`), and runs its machine's workers or a
single rank. Otherwise each of N commands would run the whole training, and write the same files.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from duoka.errors import MISSING, OptionError
from duoka.planning.options import ONE_MACHINE, Machines
from duoka.system import environment
from duoka.system.processes import process_stat

DEFAULT_PORT = 29500  # torchrun's
# Commands that start one `duoka run` on each machine.
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 1 -m duoka run train.py"
MPIRUN = "mpirun --map-by ppr:1:node duoka run train.py"
MPIEXEC = "mpiexec -ppn 1 duoka run train.py"
SRUN = "srun --ntasks-per-node 1 duoka run train.py"
JSRUN = "jsrun --rs_per_host 1 duoka run train.py"
POD = "a pod with the command duoka run train.py"
STARTERS = frozenset({"hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpirun", "orted", "prted", "prterun"})  # of MPI


@dataclass(frozen=True, slots=True)
class Task:
    """Task number `rank` of the `count` that a launcher has started for one job. What it does not tell is None."""

    engine: str  # the launcher's name
    rank: int
    count: int
    local_rank: int | None = None  # number among the tasks of its machine
    here: int | None = None  # number of these
    machines: int | None = None  # number of machines
    host: str = ""  # address of task 0; empty: unknown
    port: int = 0
    job: str = ""  # a text that names this job and this start of it, equal in all of its tasks
    store: bool = False  # the launcher's own torch store is at that address
    attempt: int = 0  # number of restarts by the launcher
    home: bool = False  # all machines of the job share the user's home directory
    how: str = ""  # a command that starts one task on each machine: `srun --ntasks-per-node 1`

    def __post_init__(self) -> None:
        """Check the variables. Raises OptionError if they contradict each other."""
        if not 0 <= self.rank < self.count:
            raise self._contradiction("the rank", self.rank, f"from 0 to {self.count - 1}")
        local = self.local_rank
        if local is not None and not 0 <= local < (here := self.here or local + 1) <= self.count:
            claim = f"{local} of {here} on its machine, and {self.count} in all"
            raise self._contradiction("the local rank", claim, "one of those of its machine")
        claim = f"{self.count} on {self.machines} machines"
        if local is None and self.machines not in (None, self.count):
            raise self._contradiction("the number of processes", claim, "one for each machine")
        if self.machines is not None and not 1 <= self.machines <= self.count:
            raise self._contradiction("the number of processes", claim, "at least one for each machine")

    @property
    def each(self) -> Literal["machine", "rank"]:
        """The role of each task: a `machine`, whose workers it starts, or a `rank`.

        One task on a machine starts workers for its devices; several on a machine are one rank each.
        """
        if self.local_rank is None or (self.here == 1 and self.machines in (None, self.count)):
            return "machine"
        return "rank"

    def _contradiction(self, what: str, claim: object, allowed: str) -> OptionError:
        hint = f"{self.how or 'the engine'} starts one for each machine; --machines 1 makes each a run of its own"
        return OptionError(f"{what} set by {self.engine}", claim, allowed, hint)


def find() -> Task | None:
    """Return the task that this process is, from the environment variables of its launcher; None if it has none.

    Raises OptionError if the variables contradict each other.
    """
    task = next((task for engine in ENGINES if (task := engine()) is not None), None)
    if task is None:
        _check_rest()
    return task


def machines(typed: int | None) -> Machines | None:
    """Return the machines of the run, from variables set by the launcher of `duoka run`; None if it set none.

    typed: `--machines`, if given: 1 makes each command a run of its own. Raises OptionError if the variables
    contradict each other, or do not say where rank 0 is.
    """
    if typed == 1:
        return ONE_MACHINE
    task = find() or indexed_job(typed)
    if task is None or task.count == 1:
        return None
    if not task.host or not task.port:
        hint = f"{task.engine} does not say where rank 0 is; for example: mpirun -x MASTER_ADDR=node1 duoka run"
        raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {task.count} processes", hint)
    return Machines(
        task.count,
        task.rank,
        task.host,
        task.port,
        engine=task.engine,
        each=task.each,
        local_rank=task.local_rank or 0,
        here=task.here or 0,
        store=task.store,
        job=f"{task.job} {task.attempt}",
        home=task.home,
        how=task.how,
    )


def refuse_copies(command: str) -> None:
    """Check that a command for one machine was started only once: each copy would do all of its work.

    Raises OptionError if a launcher has started several.
    """
    task = find()
    if task is not None and task.count > 1:
        hint = "start it once: as with srun --ntasks 1, or without the engine"
        raise OptionError(command, f"one of {task.count} that {task.engine} has started", "started once", hint)


def _check_rest() -> None:
    """Raise an error if only some rank variables are set: each process would be a run of its own."""
    rank, count = environment.number("RANK"), environment.number("WORLD_SIZE")
    # A worker may start another duoka; and RANK=0, WORLD_SIZE=1 or none mean one process.
    if environment.is_duokas_own(environment.variable("TORCHELASTIC_RUN_ID")) or (not rank and count in (None, 1)):
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = " and ".join(name for name in names if environment.number(name) is None)
    present = " and ".join(name for name in names if environment.number(name) is not None)
    hint = f"{TORCHRUN} sets all of them; --machines 1 makes each process a run of its own"
    raise OptionError(missing, MISSING, f"set where {present} is", hint)


# torchrun, and launchers that set all of its variables, such as Ray Train.


def torchrun() -> Task | None:
    """Return torchrun's task; None if it has not started this process, or the variables are duoka's own."""
    rank, count, local_rank = map(environment.number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    run = environment.variable("TORCHELASTIC_RUN_ID")
    if rank is None or count is None or local_rank is None or environment.is_duokas_own(run):
        return None
    machines = environment.number("GROUP_WORLD_SIZE")
    host, port = environment.master() or ("", 0)
    return Task(
        "torchrun",
        rank,
        count,
        local_rank,
        environment.number("LOCAL_WORLD_SIZE"),
        machines,
        host,
        port,
        job=run or "",
        store=environment.variable("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.number("TORCHELASTIC_RESTART_COUNT") or 0,
        home=machines == 1,  # of several, torchrun does not say
        how=TORCHRUN,
    )


# MPI: mpirun or mpiexec of Open MPI; and of MPICH and Intel MPI, whose launcher is Hydra.


def open_mpi() -> Task | None:
    """Return Open MPI's task; None if it has not started this process."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, count, local_rank, here = (environment.number(f"OMPI_COMM_WORLD_{name}") for name in names)
    if rank is None or count is None:
        return None
    machines = environment.number("OMPI_MCA_orte_num_nodes")
    job = environment.variable("PMIX_NAMESPACE") or environment.variable("OMPI_MCA_ess_base_jobid")
    machines = machines if machines != 1 or here == count else None
    task = Task("Open MPI", rank, count, local_rank, here, machines, job=job or "", home=True, how=MPIRUN)
    return _with_address(task)


def hydra() -> Task | None:
    """Return Hydra's task; None if it has not started this process. srun also sets PMI_RANK, for Hydra."""
    rank, count = environment.number("PMI_RANK"), environment.number("PMI_SIZE")
    # What srun sets, too, is Slurm's task: its other variables say more.
    of_slurm = environment.number("SLURM_PROCID"), environment.number("SLURM_STEP_NUM_TASKS")
    if rank is None or count is None or of_slurm == (rank, count):
        return None
    local_rank, here = environment.number("MPI_LOCALRANKID"), environment.number("MPI_LOCALNRANKS")
    local_rank, here = (rank, count) if local_rank is None else (local_rank, here)  # not all set them
    job = environment.variable("PMI_ID") or ""
    return _with_address(Task("MPI", rank, count, local_rank, here, job=job, home=True, how=MPIEXEC))


def _with_address(task: Task) -> Task:
    """Return a task with rank 0's address. MPI does not name its host; a port is enough on one machine."""
    all_here = task.local_rank is None or task.here in (None, task.count)
    # Without a name of the job: two jobs of one user on this machine must not get the same port.
    job = task.job or (all_here and _starter()) or ""
    port = environment.port_of(zlib.crc32(job.encode())) if job else None
    address = environment.master(port)
    if address is None and port is not None and all_here:
        address = (environment.LOOPBACK, port)
    host, port = address or ("", 0)
    return replace(task, host=host, port=port, job=job)


def _starter() -> str | None:
    """Return the nearest ancestor that is a launcher of MPI, which started all tasks of this machine."""
    pid = os.getppid()
    while pid > 1:  # a shell or a profiler may be between
        stat = process_stat(pid)
        if stat is None:
            return None
        if stat.name in STARTERS:
            return f"{stat.name} {pid}"
        pid = stat.parent
    return None


# Slurm: variables that srun sets for the tasks of a job step.


def slurm() -> Task | None:
    """Return srun's task; None outside of a job step.

    In `salloc`, and in a batch script without srun, the job's variables are set, but the process is the only one.
    Raises OptionError if the variables do not name the first task's machine.
    """
    tasks, rank = environment.number("SLURM_STEP_NUM_TASKS"), environment.number("SLURM_PROCID")
    if environment.number("SLURM_STEP_ID") is None or tasks is None or rank is None:
        return None
    machines = environment.number("SLURM_STEP_NUM_NODES") or environment.number("SLURM_NNODES") or 1
    local_rank, here = environment.number("SLURM_LOCALID"), _tasks_here()
    here = here if here is not None and here > (local_rank or 0) else None
    host, port = _slurm_address() if tasks > 1 else ("", 0)
    step = f"{environment.variable('SLURM_JOB_ID')}.{environment.variable('SLURM_STEP_ID')}"
    job = f"{step}.{environment.number('SLURM_RESTART_COUNT') or 0}"
    return Task("Slurm", rank, tasks, local_rank, here, machines, host, port, job=job, home=True, how=SRUN)


def idle_machines() -> int:
    """Return how many machines of a batch script's allocation a command does not use, as srun did not start it."""
    if environment.number("SLURM_JOB_ID") is None or environment.number("SLURM_STEP_ID") is not None:
        return 0
    return max(0, (environment.number("SLURM_JOB_NUM_NODES") or environment.number("SLURM_NNODES") or 1) - 1)


def _tasks_here() -> int | None:
    """Return the number of tasks on this machine, from Slurm's short form for all machines: `2(x3),1`."""
    every = environment.variable("SLURM_STEP_TASKS_PER_NODE")
    if every is None:
        return None
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", every) for _ in range(int(times or 1))
    ]
    node = environment.number("SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _slurm_address() -> tuple[str, int]:
    """Return an address for all tasks of the step: the first task's machine and a port."""
    job, step = environment.number("SLURM_JOB_ID") or 0, environment.number("SLURM_STEP_ID") or 0
    port = environment.port_of(job * 16 + step)
    nodes = environment.variable("SLURM_STEP_NODELIST") or environment.variable("SLURM_JOB_NODELIST")
    return environment.master(port) or (first_node(nodes or environment.LOOPBACK), port)


def first_node(nodes: str) -> str:
    """Return the first name in Slurm's short form of a node list: `gpu003` for `gpu[003-005,9],cpu1`.

    Raises OptionError if the text is no such list.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^\[,\s]*))?", nodes)
    if match is None:
        raise OptionError("SLURM_STEP_NODELIST", nodes, "a list of nodes", "or set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


# LSF: variables that jsrun sets for its tasks.


def lsf() -> Task | None:
    """Return jsrun's task; None if jsrun has not started this process."""
    rank, count = environment.number("JSM_NAMESPACE_RANK"), environment.number("JSM_NAMESPACE_SIZE")
    if rank is None or count is None:
        return None
    names = ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    local_rank, here = map(environment.number, names)
    job = f"{environment.variable('LSB_JOBID')} {environment.variable('JSM_NAMESPACE_ID')}"
    port = environment.port_of(zlib.crc32(job.encode()))
    hosts = _lsf_hosts()
    address = environment.master(port) or (hosts[0] if hosts else "", port)
    return Task("LSF", rank, count, local_rank, here, len(hosts) or None, *address, job=job, home=True, how=JSRUN)


def _lsf_hosts() -> list[str]:
    """Return the job's hosts, in the order of ranks. The file's first line is the host of the batch script."""
    path = environment.variable("LSB_DJOB_RANKFILE")
    with suppress(OSError):
        if path is not None:
            return list(dict.fromkeys(Path(path).read_text().split()[1:]))
    return []


# Kubernetes: pods of an Indexed Job, a JobSet or Kubeflow. A pod is a machine.


def kubeflow() -> Task | None:
    """Read Kubeflow's variables: PET_* of its trainer, or RANK and WORLD_SIZE of a PyTorchJob, which count pods.

    Raises OptionError if the number of pods may change, which needs torchrun.
    """
    nodes, rank = environment.variable("PET_NNODES"), environment.number("PET_NODE_RANK")
    if nodes is not None and not nodes.isdecimal():
        hint = "torchrun -m duoka run train.py takes task in it; a fixed number of replicas needs no torchrun"
        raise OptionError("PET_NNODES", nodes, "one number", hint)
    if nodes is not None and rank is not None:
        host, port = environment.variable("PET_MASTER_ADDR"), environment.number("PET_MASTER_PORT") or DEFAULT_PORT
        return _pod(rank, int(nodes), (host, port) if host else environment.master(port))
    rank, count = environment.number("RANK"), environment.number("WORLD_SIZE")
    if environment.variable("KUBERNETES_SERVICE_HOST") is None or rank is None or count is None:
        return None
    return _pod(rank, count, environment.master(DEFAULT_PORT))


def indexed_job(count: int | None) -> Task | None:
    """Read the variables of an Indexed Job's pod. count: `--machines`, the number of pods, which no variable holds.

    Raises OptionError if `--machines` was not given; or the pods have no host names.
    """
    index = environment.number("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    if count is None:
        hint = "--machines 4 makes 4 pods one run; --machines 1 makes each pod a run of its own"
        raise OptionError("--machines", MISSING, "given in a pod of an Indexed Job", hint)
    host, port = environment.master(DEFAULT_PORT) or (_first_pod(), DEFAULT_PORT)
    return _pod(index, count, (host, port))


def _first_pod() -> str:
    """Return the first pod's host name: this pod's with index 0, under their headless service."""
    name = socket.getfqdn()
    match = re.match(r"([^.]*-)\d+(?=\.|$)", name)
    if match is None or "." not in name:
        hint = "give the pods a headless service (subdomain: ...), or set MASTER_ADDR"
        raise OptionError("the pod's name", name, "one that other pods can reach, like train-0.train", hint)
    return f"{match[1]}0{name[match.end() :]}"


def _pod(rank: int, count: int, address: tuple[str | None, int] | None) -> Task:
    host, port = address or ("", 0)
    return Task("Kubernetes", rank, count, machines=count, host=host or "", port=port, how=POD)


# In this order: srun may start mpirun, and that torchrun; the innermost one's variables count.
ENGINES: tuple[Callable[[], Task | None], ...] = (torchrun, open_mpi, hydra, lsf, slurm, kubeflow)
