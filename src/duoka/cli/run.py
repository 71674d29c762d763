"""`duoka run`: run a script on the devices of this machine, or of several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from duoka import engines
from duoka.cli.words import arrange, check_habits, check_times, with_values
from duoka.devices import inventory
from duoka.devices.allocation import Allocation, AllocationRequest, allocate, with_holders
from duoka.devices.locks import Locks
from duoka.devices.spec import parse
from duoka.engines import slurm, torchrun
from duoka.errors import MISSING, OptionError
from duoka.planning import options
from duoka.planning.describing import details, header
from duoka.planning.options import ONE_MACHINE, Machines, Options
from duoka.planning.plan import Plan, decide
from duoka.script import Target
from duoka.script.files import STANDARD_INPUT
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

ORDER = """\
All that follows the script is the script's. Options may also stand after the script, if a `--` follows them;
without one, those directly after it are duoka's if none stands before it and the script does not take
them. A `--` for the script itself is written twice.
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

STRATEGY = (
    "How parameters are synchronized. fsdp: each device holds a part of the model. hsdp: the same on each of several "
    "machines, each of which holds the whole model. exact: the same bits on any number of devices. auto: ddp if it "
    "fits on each device, else fsdp, as the first steps on one CPU worker tell before the run. [default: single for "
    "one device, ddp for several]"
)

DEVICE_MEMORY = (
    "With --strategy auto: what each device has, such as 24GB. [default: as the GPU says; what is free, for CPUs]"
)

MACHINES = "How many machines compute together: this command is started on each. [default: set by the launcher, or 1]"

VALUE_OPTIONAL = {"--wait": "720h"}  # option -> its value if it is given without `=value`

Groups = tuple[tuple[str, tuple[click.Option, ...]], ...]

GROUPS: Groups = (
    (
        "What to run, and where",
        (
            click.Option(["-m", "is_module"], is_flag=True, help="SCRIPT is a module's name, as for `python -m`."),
            click.Option(["--devices"], default="auto", metavar="DEVICES", help=DEVICES),
            click.Option(
                ["--wait"],
                metavar="[=TIME]",
                help="Queue until devices are free, for at most TIME: --wait=30m. Without TIME, up to 30 days.",
            ),
            click.Option(["--device-memory"], metavar="SIZE", help=DEVICE_MEMORY),
            click.Option(
                ["--kind"],
                default="auto",
                metavar="auto|plain|distributed|api",
                help="Override the detected kind of script, if it can be several.",
            ),
            click.Option(["--machines"], metavar="N", help=MACHINES),
            click.Option(["--machine"], metavar="K", help="The number of this machine; rank 0 is on machine 0."),
            click.Option(
                ["--rendezvous"],
                metavar="HOST:PORT",
                help="The name or address of machine 0, and a port that is free there.",
            ),
            click.Option(
                ["--key-file"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="A secret shared by all machines, to authenticate each other. [default: DUOKA_KEY]",
            ),
            click.Option(
                ["--threads"],
                metavar="N",
                help="Processor threads for each worker. [default: cores / workers]",
            ),
            click.Option(
                ["--timeout"],
                default="10m",
                metavar="TIME",
                help="Longest time that a rank waits for the others: 90, 90s, 10m, 1h. [default: 10m]",
            ),
            click.Option(
                ["--step-timeout"],
                default="auto",
                metavar="auto|TIME",
                help="The same after step 1. auto: for an idle rank, 20 times the slowest step, at least 60s.",
            ),
            click.Option(
                ["--restarts"],
                default="0",
                metavar="N",
                help=RESTARTS,
            ),
        ),
    ),
    (
        "How plain scripts are computed",
        (
            click.Option(
                ["--strategy"],
                default="",
                metavar="single|ddp|fsdp|hsdp|exact|auto",
                help=STRATEGY,
            ),
            click.Option(
                ["--blocks"],
                metavar="NAME,...",
                help="With fsdp: classes of modules whose parameters are gathered together. "
                "[default: entries of the model's lists]",
            ),
            click.Option(
                ["--checkpoint-activations"],
                is_flag=True,
                help="With fsdp: blocks compute activations again in the backward pass, which takes less memory.",
            ),
            click.Option(
                ["--cpu-offload"],
                is_flag=True,
                help="With fsdp: keep parameters, gradients and optimizer states in the host's memory.",
            ),
            click.Option(
                ["--shares"],
                metavar="N",
                help="With exact: shares of each batch, a power of two. [default: 8, or as many as devices]",
            ),
            click.Option(
                ["--rows"],
                default="",
                metavar="auto|even|3:1",
                help="How the devices share the rows of a batch. auto: by speed, measured in the first steps. "
                "[default: auto for GPUs that differ, else even]",
            ),
            click.Option(
                ["--batch-norm"],
                default="whole",
                metavar="whole|local",
                help="Statistics of the whole batch, or of each share (faster, but other numbers).",
            ),
            click.Option(
                ["--randomness"],
                default="whole",
                metavar="whole|worker",
                help="Draws for the whole batch, or each rank's own (faster, but other numbers).",
            ),
            click.Option(
                ["--loading"],
                default="auto",
                metavar="auto|whole|shared",
                help="Each rank loads the whole batch, or its share. auto: its share where that is safe.",
            ),
            click.Option(
                ["--row-independent"],
                metavar="NAME,...",
                help="Autograd Functions, scripted functions and operators of extensions that compute each row by "
                "itself, which duoka cannot know: they get each rank's rows. `duoka prove` compares.",
            ),
        ),
    ),
    (
        "What is shown",
        (
            click.Option(["--dry-run"], is_flag=True, help="Print the plan, and start nothing."),
            click.Option(
                ["--log-dir"],
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Keep the output of ranks 1, 2, ... here. [default: only after a failure]",
            ),
            click.Option(
                ["--report"],
                type=click.Path(path_type=Path),
                metavar="FILE.html",
                help="At the end, also after a fault, write what the run did as one page: charts, findings, faults.",
            ),
            click.Option(["-q", "--quiet"], is_flag=True, help="No header."),
            click.Option(["-v", "--verbose"], is_flag=True, help="The whole plan as the header."),
        ),
    ),
)


class ScriptCommand(click.Command):
    """A command whose arguments end with a script and its own arguments; shows options in groups."""

    def __init__(self, name: str, *, groups: Groups, examples: str, **how: Any) -> None:
        self._groups, self._examples = groups, examples
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        settings = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 110}
        params = [*(option for _, group in groups for option in group), words]
        super().__init__(name, params=params, context_settings=settings, **how)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Separate duoka's options from the script's arguments before click parses them."""
        takes_value = {
            name: not (isinstance(param, click.Option) and (param.is_flag or name in VALUE_OPTIONAL))
            for param in self.get_params(ctx)
            for name in param.opts
            if name.startswith("-")
        }
        check_habits(args, takes_value)
        check_times(args, takes_value, VALUE_OPTIONAL)
        return super().parse_args(ctx, with_values(arrange(args, takes_value), takes_value, VALUE_OPTIONAL))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the three forms."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] SCRIPT [ARGS]...")
        for form in ("[OPTIONS] -m MODULE [ARGS]...", "SCRIPT [OPTIONS] -- [ARGS]..."):
            formatter.write_usage(ctx.command_path, form, prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups, then examples."""
        for title, group in (*self._groups, ("About this", (self.get_help_option(ctx),))):
            with formatter.section(title):
                formatter.write_dl([record for option in group if option and (record := option.get_help_record(ctx))])
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self._examples.splitlines()))
        formatter.write_paragraph()
        formatter.write_text(ORDER)


def run(
    words: tuple[str, ...],
    is_module: bool,
    dry_run: bool,
    wait: str | None,
    machines: str | None,
    machine: str | None,
    rendezvous: str | None,
    device_memory: str | None,
    **asked: Any,
) -> Callable[[], int] | int:
    """Decide, show the decision, and return the function that launches it."""
    if not words:
        raise click.UsageError("a script is missing; for example: duoka run train.py", click.get_current_context())
    target = Target(words[0], words[1:], is_module)
    several = options.which_machines(machines, machine, rendezvous, engines.machines)
    opts = asked_for(target, machines=several, **asked)
    if device_memory is not None and opts.strategy != "auto":
        raise OptionError("--strategy", opts.strategy or MISSING, "auto if --device-memory is given")
    memory = None if device_memory is None else options.memory_size(device_memory, "--device-memory")
    limit = 0.0 if wait is None else options.seconds(wait, "--wait")
    if dry_run:
        click.echo(details(_decide(opts)))
        return 0
    return partial(_run, opts, limit, memory)


def _run(opts: Options, limit: float, memory: int | None) -> int:
    """Allocate devices, wait for them `limit` seconds at most, run the script, and return the exit code.

    memory: bytes of each device, for `--strategy auto`; None: as the devices say.
    """
    starter = environment.starter()
    if torchrun.find() is not None or starter is not None:  # both leave their processes running if they are killed
        libc.die_with(starter or os.getppid())
    if opts.machines.count > 1 and environment.hash_seed_is_random():
        environment.fix_hash_seed()
        if opts.target.name == STANDARD_INPUT:
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
            from duoka.cli.choosing import run_chosen  # imports this module

            return run_chosen(plan, opts, memory, _start)
        return _start(plan)


def _start(plan: Plan) -> int:
    _show(plan)
    return _launch(plan)


def _idle(machines: Machines) -> tuple[str, ...]:
    """Return a note if a Slurm allocation has more machines than this one, and no srun uses them."""
    idle = slurm.idle_machines() if machines.count == 1 else 0
    if not idle:
        return ()
    others = "another machine" if idle == 1 else f"{idle} other machines"
    return (f"Slurm has allocated {others}, which {'is' if idle == 1 else 'are'} left idle: {slurm.HOW} uses all",)


def _allocate(opts: Options, wait: float) -> Allocation[Plan]:
    """Decide, and allocate the devices."""
    threads = environment.threads()
    command = f"duoka run {'-m ' * opts.target.is_module}{opts.target.name}"
    asked = AllocationRequest(parse(opts.devices), command)
    return allocate(asked, lambda found: decide(opts, found, threads), lambda plan: plan.devices, wait, say)


def _decide(opts: Options) -> Plan:
    """Decide without allocating devices."""
    seen = inventory.read(parse(opts.devices).type)
    with Locks() as locks:
        return decide(opts, with_holders(seen, locks), environment.threads())


def asked_for(
    target: Target,
    threads: str | None,
    timeout: str,
    step_timeout: str,
    restarts: str,
    shares: str | None,
    row_independent: str | None,
    blocks: str | None,
    quiet: bool,
    verbose: bool,
    machines: Machines = ONE_MACHINE,
    **words: Any,
) -> Options:
    """Convert the words of a command line to `Options`. words: those that `Options` takes unchanged."""
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose exclude each other", click.get_current_context())
    return Options(
        target,
        threads=None if threads is None else options.whole_number(threads, "--threads"),
        timeout=options.seconds(timeout),
        step_timeout=None if step_timeout == "auto" else options.seconds(step_timeout, "--step-timeout"),
        restarts=options.whole_number(restarts, "--restarts"),
        shares=None if shares is None else options.whole_number(shares, "--shares"),
        row_independent=() if row_independent is None else tuple(map(str.strip, row_independent.split(","))),
        blocks=() if blocks is None else tuple(map(str.strip, blocks.split(","))),
        verbosity="quiet" if quiet else "verbose" if verbose else "normal",
        machines=machines,
        **words,
    )


def _show(plan: Plan) -> None:
    if plan.machines.each == "rank" and plan.machines.number > 0:
        return
    if plan.verbosity == "normal":
        print(header(plan), file=sys.stderr, flush=True)
    elif plan.verbosity == "verbose":
        lines = details(plan).splitlines()
        print("\n".join(f"duoka: {line}" for line in lines), file=sys.stderr, flush=True)


def _launch(plan: Plan) -> int:
    from duoka.launchers import launch  # imports torch; a plan is made without it

    code = launch(plan)
    if (
        not plan.is_for_one or plan.restarts or plan.report
    ):  # the script ran in workers; unloading torch here only takes time
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed: `>&-`
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


command = ScriptCommand("run", callback=run, help=INTRODUCTION, groups=GROUPS, examples=EXAMPLES)
