"""The engines that start processes on many machines, and what each tells a process: one file for each.

torchrun     RANK, LOCAL_RANK, WORLD_SIZE; also what sets the same, as Ray Train
mpi          mpirun, mpiexec
slurm        srun
lsf          jsrun
kubernetes   an Indexed Job, a JobSet, Kubeflow

Whatever started it, a command is then a part of one run: number `rank` of `count` (`Part`), and it stands for its
machine or for a single rank. Without this each of N commands would run the whole training, and write the same files.
"""

from __future__ import annotations

from collections.abc import Callable

from duoka import environment
from duoka.engines import kubernetes, lsf, mpi, slurm, torchrun
from duoka.engines.part import Local, Part
from duoka.errors import MISSING, OptionError
from duoka.options import ONE_MACHINE, Machines

__all__ = ["Local", "Part", "found", "machines", "refuse_copies"]

# In this order: srun may start mpirun, and that torchrun, whose word is then the later one.
ENGINES: tuple[Callable[[], Part | None], ...] = (
    torchrun.found,
    mpi.open_mpi,
    mpi.hydra,
    lsf.found,
    slurm.found,
    kubernetes.kubeflow,
)


def found() -> Part | None:
    """What an engine tells this process; None where none has started it.

    Raises:
        OptionError: what it tells makes no sense.
    """
    part = next((part for engine in ENGINES if (part := engine()) is not None), None)
    if part is None:
        _check_rest()
    return part


def machines(typed: int | None) -> Machines | None:
    """What an engine tells the command `duoka run` of the others of its run; None where there are no others.

    typed: `--machines`, if it was given: 1 makes the command a run of its own, whoever started it.

    Raises:
        OptionError: what it tells makes no sense; or it does not say where to meet.
    """
    if typed == 1:
        return ONE_MACHINE
    part = found() or kubernetes.indexed_job(typed)
    if part is None or part.count == 1:
        return None
    if not part.host or not part.port:
        hint = f"{part.engine} does not say where rank 0 is; for example: mpirun -x MASTER_ADDR=node1 duoka run"
        raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {part.count} processes", hint)
    local = part.local or Local(0)
    return Machines(
        part.count,
        part.rank,
        part.host,
        part.port,
        told_by=part.engine,
        each=part.each,
        local_rank=local.rank,
        here=local.count or 0,
        store=part.store,
        job=f"{part.job} {part.attempt}",
        home=part.home,
        how=part.how,
    )


def refuse_copies(command: str) -> None:
    """See that no engine has started several of a command that is for one machine: each would do all of it.

    Raises:
        OptionError: one has.
    """
    part = found()
    if part is not None and part.count > 1:
        hint = "start it once: as with srun --ntasks 1, or without the engine"
        raise OptionError(command, f"one of {part.count} that {part.engine} has started", "started once", hint)


def _check_rest() -> None:
    """Of variables that only make sense together some are set: somebody meant a rank, and each would be a run."""
    rank, count = environment.number("RANK"), environment.number("WORLD_SIZE")
    if environment.is_duokas_own(environment.variable("TORCHELASTIC_RUN_ID")) or (not rank and count in (None, 1)):
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = " and ".join(name for name in names if environment.number(name) is None)
    given = " and ".join(name for name in names if environment.number(name) is not None)
    hint = f"{torchrun.HOW} sets all of them; --machines 1 makes each process a run of its own"
    raise OptionError(missing, MISSING, f"set where {given} is", hint)
