"""`duoka forecast`: measure whether more devices make a script faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click

from duoka.cli.memory import forecast_memory, powers_below
from duoka.cli.script_command import ScriptCommand, option, options_of
from duoka.cli.trial import decide_and_take, own_ranks_error, say_plan, sayer, shown_options, to_the_end, write_report
from duoka.errors import OptionError
from duoka.hardware import inventory
from duoka.planning.describing import described_rows
from duoka.planning.options import Options
from duoka.planning.plan import Kind, Plan

INTRODUCTION = """\
Measure whether more devices make a script faster.

Runs the first steps of the script on 1, 2, 4, ... up to the given devices, one after the other. Prints the time of a
step on each, the fastest number, and why more are not faster. Files that the script writes go to a scratch folder,
which is removed.

With --memory: three steps on one CPU worker, and the peak memory of a device under each strategy.
"""

EXAMPLES = """\
duoka forecast train.py                              on 1, 2, 4, ... and all GPUs
duoka forecast --devices cpu:2 train.py              on one CPU worker and on two
duoka forecast --devices 0,3 train.py --epochs 5     on GPU 0, and on GPUs 0 and 3; --epochs 5 is for train.py
duoka forecast --memory --devices 4 train.py         will it fit on four GPUs, and with which strategy?
"""

DEVICES = "As for `duoka run`: the largest set to measure. [default: auto]"
STEPS = "Steps on each; the first 10, or a third of fewer than 30, do not count. [default: 30]"
MEMORY = "Print the peak memory of a device under each strategy, and which one to use, instead of times."
DEVICE_MEMORY = (
    "With --memory: what each device has, such as 24GB. [default: as the GPU says; what is free, for CPUs]"
)
MACHINES = "With --memory: so many machines, each with these devices. [default: 1]"
FEWEST, MOST = 7, 100_000  # fewer would leave too few to count

OPTIONS = (
    option("--devices", "DEVICES", DEVICES, "auto"),
    option("--steps", "N", STEPS, kind=int),
    option("--memory", text=MEMORY),
    option("--device-memory", "SIZE", DEVICE_MEMORY),
    option("--machines", "N", MACHINES, 1, int),
)


def forecast(
    steps: int | None, memory: bool, device_memory: str | None, machines: int, as_json: bool, **others: Any
) -> Callable[[], int]:
    """Check the options, and return the function that runs the forecast."""
    if memory and steps is not None:
        raise OptionError("--steps", steps, "left out with --memory", "three steps are enough for the peak memory")
    steps = 30 if steps is None else steps
    if not FEWEST <= steps <= MOST:
        raise OptionError("--steps", steps, f"a whole number from {FEWEST} to {MOST:,}")
    opts = options_of(**others)
    if memory:
        if machines < 1:
            raise OptionError("--machines", machines, "a whole number, at least 1")
        return forecast_memory(opts, device_memory, machines, "json" if as_json else opts.verbosity)
    if device_memory is not None:
        raise OptionError("--device-memory", device_memory, "given with --memory")
    if machines != 1:
        raise OptionError("--machines", machines, "given with --memory")

    def run() -> int:
        plans, held = decide_and_take("forecast", opts, partial(_growing, opts.devices))
        with held:
            return to_the_end(lambda: _run(opts, plans, steps, "json" if as_json else opts.verbosity))

    return run


def _growing(devices: str, decided: Callable[[str], Plan]) -> list[Plan]:
    """Return the plans for 1, 2, 4, ... of the devices, and for all of them.

    Where their shares of a batch are not even: for the fastest alone, and for all of them, first with even shares.
    Raises OptionError if `devices` is one device, AskedError if the script calls torch.distributed itself.
    """
    most = decided(devices)
    if most.kind is Kind.DISTRIBUTED:
        raise own_ranks_error(
            most,
            "and the batch of each",
            "a step on two devices need not be the step of one, so their times cannot be compared",
        )
    if len(most.devices) == 1:
        raise OptionError(
            "--devices", devices, "several devices", f"here it is one ({most.devices[0]}); cpu:2 is two CPU workers"
        )
    if most.weights or most.measures_rows:  # 1, 2, 4, … of unlike devices would not be one series
        fastest = max(range(most.workers), key=most.weights.__getitem__) if most.weights else 0
        alone = decided(replace(most, devices=most.devices[fastest : fastest + 1]).device_words)
        return [alone, replace(most, weights=(), measures_rows=False), most]
    fewer = [replace(most, devices=most.devices[:count]) for count in powers_below(len(most.devices))]
    return [*(decided(plan.device_words) for plan in fewer), most]


def _named(plan: Plan, plans: Sequence[Plan]) -> str:
    if plan is plans[-1] and (plan.weights or plan.measures_rows):
        return f"{plan.device_words}, rows {'as measured' if plan.measures_rows else described_rows(plan)}"
    is_even = plan.devices == plans[-1].devices and plan is not plans[-1]
    return f"{plan.device_words}, even rows" if is_even else plan.device_words


def _run(opts: Options, plans: Sequence[Plan], steps: int, shown: str) -> int:
    from duoka.forecasting import forecast as forecasting  # imports torch; a plan is made without it

    say = sayer(shown)
    say_plan(plans[-1].device_words, plans[-1], say)
    named = [(_named(plan, plans), plan) for plan in plans]
    result = forecasting.forecast(opts.target.name, named, steps, inventory.cores(), opts.log_dir, say)
    write_report(opts.report, lambda: forecasting.page(result))
    click.echo(forecasting.as_data(result) if shown == "json" else forecasting.as_text(result, shown))
    return 0


command = ScriptCommand(
    "forecast",
    callback=forecast,
    help=INTRODUCTION,
    title="What to measure",
    options=OPTIONS,
    shown=shown_options("For every number of devices, why it is below the ideal.", "Only the verdict."),
    examples=EXAMPLES,
)
