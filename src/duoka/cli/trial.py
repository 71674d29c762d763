"""Shared parts of the commands that run a script's first steps (forecast, prove)."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from duoka import engines
from duoka.cli.script_command import PATH, option
from duoka.errors import AskedError, OptionError
from duoka.hardware.allocation import allocate
from duoka.hardware.locks import HeldLocks
from duoka.hardware.spec import parse
from duoka.planning.describing import header
from duoka.planning.options import Options
from duoka.planning.plan import Plan, decide
from duoka.system import disk, environment
from duoka.system.messages import say


def shown_options(verbose: str, quiet: str) -> tuple[click.Option, ...]:
    """Return the options about the output. verbose, quiet: help texts of these two."""
    return (
        option("--json as_json", text="As data."),
        option("-v --verbose", text=verbose),
        option("-q --quiet", text=quiet),
        option("--log-dir", "DIR", "Keep what the script printed in each run here. [default: not kept]", kind=PATH),
        option("--report", "FILE.html", "Also write the result as a page with charts.", kind=PATH),
    )


def decide_and_take(
    command: str, opts: Options, choose: Callable[[Callable[[str], Plan]], list[Plan]]
) -> tuple[list[Plan], HeldLocks]:
    """Make all plans, and lock the GPUs of all of them.

    choose: called with a function that makes a plan for a `--devices` text; returns all plans.
    """
    engines.refuse_copies(f"duoka {command}")
    if opts.strategy == "auto":
        raise OptionError("--strategy", "auto", f"named for duoka {command}", "`duoka run` chooses one by its memory")
    opts = replace(opts, report=None)  # of the trials together, not of one of them
    threads = environment.threads()
    allocation = allocate(
        parse(opts.devices),
        f"duoka {command} {opts.target.name}",
        lambda seen: choose(lambda devices: decide(replace(opts, devices=devices), seen, threads)),
        # All at once: no trial waits for its own.
        lambda plans: [device for plan in plans for device in plan.devices],
        0.0,
        say,
    )
    return allocation.decided, allocation.locks


def sayer(shown: str) -> Callable[[str], None]:
    """Return a function that prints progress on standard error, if shown."""
    return say if shown in ("normal", "verbose") else lambda text: None


def say_plan(name: str, plan: Plan, say: Callable[[str], None]) -> None:
    """Print the header of a run's plan."""
    for line in header(plan):
        say(f"{name}: {line}")


def write_report(path: Path | None, page: Callable[[], str]) -> None:
    """Write the result as a page, if that was asked for; say so if it cannot be written any more."""
    if path is None:
        return
    try:
        disk.replace_by(path, page().encode())
    except OSError as error:
        say(f"the report cannot be written to {path}: {error.strerror}")


def own_ranks_error(plan: Plan, makes: str, so: str) -> AskedError:
    """Return the error for a script that calls torch.distributed, which cannot be forecast.

    makes: what else the script makes by itself. so: what follows.
    """
    other = "; --kind plain forecasts it as a plain script" if plan.kind_can_be_either else ""
    return AskedError(f"{plan.target.name} makes its ranks, {makes}, itself ({plan.kind_reason}), so {so}{other}")


def to_the_end(trials: Callable[[], int]) -> int:
    """Run trials, and exit with the code that they return, or that of the signal which stopped them.

    Raises TrialFailed if the script failed; its output has been printed.
    """
    from duoka.trials.runner import Stopped, TrialFailed  # imports torch; a plan is made without it

    try:
        code = trials()
    except Stopped as stopped:
        say("interrupted" if stopped.code == 130 else "stopped")
        code = stopped.code
    except TrialFailed as failed:
        print(failed.report, end="", file=sys.stderr, flush=True)
        raise
    finally:
        gc.unfreeze()  # `import_once` has frozen modules, and triton reports those that are not freed at the end
    with suppress(OSError):  # the script ran in workers; unloading torch here only takes time
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
