"""Find out by which job launcher this process was started, from its environment (`variables.py`).

torchrun     RANK, LOCAL_RANK, WORLD_SIZE; also launchers that set the same, as Ray Train
MPI          mpirun, mpiexec
Slurm        srun
LSF          jsrun
Kubernetes   an Indexed Job, a JobSet, Kubeflow

A command started by one is task number `rank` of `count` of one run (`Task`), and runs its machine's workers or a
single rank. Otherwise each of N commands would run the whole training, and write the same files.
"""

from __future__ import annotations

from collections.abc import Callable

from duoka.engines import variables
from duoka.engines.variables import Task
from duoka.errors import MISSING, OptionError
from duoka.planning.options import ONE_MACHINE, Machines
from duoka.system import environment

__all__ = ["Task", "find", "machines", "refuse_copies"]

# In this order: srun may start mpirun, and that torchrun; the innermost one's variables count.
ENGINES: tuple[Callable[[], Task | None], ...] = (
    variables.torchrun,
    variables.open_mpi,
    variables.hydra,
    variables.lsf,
    variables.slurm,
    variables.kubeflow,
)


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
    task = find() or variables.indexed_job(typed)
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
    if environment.is_duokas_own(environment.variable("TORCHELASTIC_RUN_ID")) or (not rank and count in (None, 1)):
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = " and ".join(name for name in names if environment.number(name) is None)
    present = " and ".join(name for name in names if environment.number(name) is not None)
    hint = f"{variables.TORCHRUN} sets all of them; --machines 1 makes each process a run of its own"
    raise OptionError(missing, MISSING, f"set where {present} is", hint)
