"""`duoka run`: run a script on the devices of this machine, or of several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import click

from duoka import engines
from duoka.cli.memory import with_strategy_that_fits
from duoka.cli.script_command import PATH, ScriptCommand, option, options_of
from duoka.cli.trial import to_the_end
from duoka.engines import SRUN, idle_machines, torchrun
from duoka.errors import MISSING, OptionError
from duoka.hardware.allocation import Allocation, allocate, read_with_holders
from duoka.hardware.spec import parse
from duoka.planning import options
from duoka.planning.describing import details, header
from duoka.planning.options import Machines, Options
from duoka.planning.plan import Plan, decide
from duoka.script.target import STANDARD_INPUT
from duoka.system import environment, libc
from duoka.system.messages import say

INTRODUCTION = """\
Run a PyTorch script, unedited, on one device or many.

SCRIPT may be written for one device, may use torch.distributed (it is then launched as torchrun would), or
may use duoka's API; duoka detects which. `batch_size` in the script is always the global
batch: all devices together compute what one device would.
"""

EXAMPLES = """\
duoka run train.py                               all GPUs, or the CPU
duoka run --devices 0,3 train.py --epochs 5      GPUs 0 and 3; --epochs 5 is for train.py
duoka run train.py --devices 0,3 -- --epochs 5   the same
duoka run --devices cpu:2 -m package.train       a module, on two CPU workers
duoka run - < train.py                           a script from standard input
duoka run --dry-run train.py                     what would be done, and why
duoka run --machines 2 --machine 0 --rendezvous node1:29500 train.py   on node1; --machine 1 on the other
"""

DEVICES = (
    "auto: all GPUs, else one CPU worker. 2: that many GPUs, else that many CPU workers. 0,3 or 0-3: GPUs by "
    "their number in `duoka gpus` (`1,` is GPU 1 alone). GPU-3c1a6d0e, MIG-5a2f: by UUID. free:2: on which nobody "
    "computes; 'free:2,mem>=10G'; best:1. gpu, gpu:1, cpu, cpu:4, mps. [default: auto]"
)

RESTARTS = (
    "After a fault (a rank is killed, crashes, hangs or raises) start the workers again, at most N times. The script "
    "goes on from where it last saved, if it restores that by itself, as duoka.Checkpoint does. [default: 0]"
)

DEVICE_MEMORY = (
    "With --strategy auto: what each device has, such as 24GB. [default: as the GPU says; what is free, for CPUs]"
)

MACHINES = "How many machines compute together: this command is started on each. [default: set by the launcher, or 1]"

OPTIONS = (
    option("--devices", "DEVICES", DEVICES, "auto"),
    option(
        "--wait",
        "[=TIME]",
        "Queue until devices are free, for at most TIME: --wait=30m. Without TIME, up to 30 days.",
    ),
    option("--device-memory", "SIZE", DEVICE_MEMORY),
    option("--machines", "N", MACHINES),
    option("--machine", "K", "The number of this machine; rank 0 is on machine 0."),
    option("--rendezvous", "HOST:PORT", "The name or address of machine 0, and a port that is free there."),
    option(
        "--key-file",
        "FILE",
        "A secret shared by all machines, to authenticate each other. [default: DUOKA_KEY]",
        kind=PATH,
    ),
    option("--restarts", "N", RESTARTS, "0"),
    option(
        "--step-timeout",
        "auto|TIME",
        "--timeout after step 1. auto: for an idle rank, 20 times the slowest step, at least 60s.",
        "auto",
    ),
)
SHOWN = (
    option("--dry-run", text="Print the plan, and start nothing."),
    option("--log-dir", "DIR", "Keep the output of ranks 1, 2, ... here. [default: only after a failure]", kind=PATH),
    option(
        "--report",
        "FILE.html",
        "At the end, also after a fault, write what the run did as one page: charts, findings, faults.",
        kind=PATH,
    ),
    option("-q --quiet", text="No header."),
    option("-v --verbose", text="The whole plan as the header."),
)


def run(
    dry_run: bool,
    wait: str | None,
    machines: str | None,
    machine: str | None,
    rendezvous: str | None,
    device_memory: str | None,
    **others: Any,
) -> Callable[[], int] | int:
    """Decide, show the decision, and return the function that launches it."""
    several = options.which_machines(machines, machine, rendezvous, engines.machines)
    opts = options_of(machines=several, **others)
    if device_memory is not None and opts.strategy != "auto":
        raise OptionError("--strategy", opts.strategy or MISSING, "auto if --device-memory is given")
    memory = None if device_memory is None else options.memory_size(device_memory, "--device-memory")
    limit = 0.0 if wait is None else options.seconds(wait, "--wait")
    if dry_run:
        # What other runs hold is not chosen, and nothing is locked.
        seen = read_with_holders(parse(opts.devices).type)
        click.echo(details(decide(opts, seen, environment.threads())))
        return 0
    return partial(_run, opts, limit, memory)


def _run(opts: Options, limit: float, memory: int | None) -> int:
    """Allocate devices, wait for them `limit` seconds at most, run the script, and return the exit code.

    memory: bytes of each device, for `--strategy auto`; None: as the devices say.
    """
    starter = environment.starter()
    if torchrun() is not None or starter is not None:  # both leave their processes running if they are killed
        libc.die_with(starter or os.getppid())
    # Workers forked from one process have one order of sets of strings; those of several machines would not.
    if opts.machines.count > 1 and environment.fix_hash_seed():
        if opts.target.name == STANDARD_INPUT:  # which was read for the kind of the script
            os.lseek(0, 0, os.SEEK_SET)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # Python reads the variable at its start
    try:
        allocation = _allocate(opts, limit)
    except KeyboardInterrupt:
        say("interrupted while waiting for devices")
        return 130
    plan = replace(allocation.decided, notes=(*allocation.decided.notes, *allocation.notes, *_idle(opts.machines)))
    with allocation.locks:
        if plan.strategy == "auto":
            return to_the_end(lambda: _start(with_strategy_that_fits(plan, opts, memory)))
        return _start(plan)


def _idle(machines: Machines) -> tuple[str, ...]:
    """Return a note if a Slurm allocation has more machines than this one, and no srun uses them."""
    idle = idle_machines() if machines.count == 1 else 0
    if not idle:
        return ()
    others = "another machine" if idle == 1 else f"{idle} other machines"
    return (f"Slurm has allocated {others}, which {'is' if idle == 1 else 'are'} left idle: {SRUN} uses all",)


def _allocate(opts: Options, wait: float) -> Allocation[Plan]:
    command = f"duoka run {'-m ' * opts.target.is_module}{opts.target.name}"
    decided = partial(decide, opts, omp_threads=environment.threads())
    return allocate(parse(opts.devices), command, decided, lambda plan: plan.devices, wait, say)


def _start(plan: Plan) -> int:
    if plan.verbosity != "quiet" and (plan.machines.each == "machine" or plan.machines.number == 0):
        lines = details(plan).splitlines() if plan.verbosity == "verbose" else header(plan)
        print("\n".join(f"duoka: {line}" for line in lines), file=sys.stderr, flush=True)

    # Nobody has to watch one worker, but to start it again or to write about it.
    if plan.is_for_one and not (plan.restarts or plan.report):
        from duoka.launchers.inline import run_inline

        return run_inline(plan)
    from duoka.launchers.local import run_local  # imports torch; a plan is made without it

    code = run_local(plan)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed: `>&-`
        with suppress(OSError):
            stream.flush()
    os._exit(code)  # the script ran in workers; unloading torch takes time


command = ScriptCommand(
    "run",
    callback=run,
    help=INTRODUCTION,
    title="What to run, and where",
    options=OPTIONS,
    shown=SHOWN,
    examples=EXAMPLES,
)
