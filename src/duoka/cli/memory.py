"""Forecasts of memory: `duoka forecast --memory`, and `duoka run --strategy auto`, which takes what fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import click

from duoka.cli.trial import own_ranks_error, sayer, to_the_end
from duoka.errors import AskedError, DuokaError, OptionError
from duoka.hardware import inventory
from duoka.hardware.choice import memory_of_each
from duoka.hardware.spec import parse
from duoka.planning.options import ONE_MACHINE, Options, memory_size
from duoka.planning.plan import Kind, Plan, decide
from duoka.system import environment

EVERY = "every strategy is compared with --memory"  # a reason to leave out an option


def forecast_memory(opts: Options, device_memory: str | None, machines: int, shown: str) -> Callable[[], int]:
    """Check the options, and return the function that runs the forecast.

    device_memory: of each device, as text. machines: their number, each with the devices asked for.
    """
    for option, value, is_given in (
        ("--strategy", opts.strategy, opts.strategy != ""),
        ("--checkpoint-activations", True, opts.checkpoint_activations),
        ("--cpu-offload", True, opts.cpu_offload),
        ("--shares", opts.shares, opts.shares is not None),
        ("--rows", opts.rows, opts.rows != ""),
        ("--report", opts.report, opts.report is not None),
    ):
        if is_given:
            raise OptionError(option, str(value), "left out", EVERY if option != "--report" else "--json gives data")
    limit = None if device_memory is None else memory_size(device_memory, "--device-memory")
    return lambda: to_the_end(lambda: _run(opts, limit, machines, shown))


def _run(opts: Options, limit: int | None, machines: int, shown: str) -> int:
    from duoka.forecasting import memory  # imports torch; a plan is made without it

    seen, threads = inventory.read(parse(opts.devices).type), environment.threads()
    plain = replace(opts, blocks=())  # for the plans, which are not of fsdp
    most = decide(plain, seen, threads)
    if most.kind is Kind.DISTRIBUTED:
        so = "a run on one device does not show its memory on several"
        raise own_ranks_error(most, "and how each computes", so)
    sets = []
    for count in (*powers_below(len(most.devices)), len(most.devices)):
        part = replace(most, devices=most.devices[:count])
        size = memory_of_each(part.devices, seen) if limit is None else limit
        sets.append(memory.DeviceSet(on_machines(part.device_words, machines), count * machines, size))
    on_cpu = decide(replace(plain, devices="cpu:1"), seen, threads)
    request = memory.MemoryRequest(opts.target.name, on_cpu, sets, opts.blocks, opts.log_dir, machines=machines)
    forecast = memory.forecast_memory(request, sayer(shown))
    click.echo(memory.as_data(forecast) if shown == "json" else memory.as_text(forecast, shown))
    return 0


def on_machines(devices: str, machines: int) -> str:
    """Name the devices of several machines."""
    return devices if machines == 1 else f"{devices} on each of {machines} machines"


def powers_below(number: int) -> Iterator[int]:
    """Yield the powers of two below a number."""
    power = 1
    while power < number:
        yield power
        power *= 2


def with_strategy_that_fits(plan: Plan, opts: Options, size: int | None) -> Plan:
    """Return a plan of the strategy auto with the first strategy that fits the devices.

    size: bytes of each device's memory; None: as the devices say. Raises AskedError if no strategy fits, DuokaError
    if the forecast of the script's memory failed.
    """
    from duoka.forecasting import memory  # imports torch; a plan is made without it

    seen = inventory.read(plan.devices[0].type)
    limit = memory_of_each(plan.devices, seen) if size is None else size
    # The options of the run, without those that one CPU worker does not take.
    alone = replace(opts, strategy="", devices="cpu:1", blocks=(), restarts=0, report=None, machines=ONE_MACHINE)
    on_cpu = decide(alone, seen, environment.threads())
    count = plan.machines.count
    devices = memory.DeviceSet(on_machines(plan.device_words, count), len(plan.devices) * count, limit)
    machines = count if plan.machines.each == "machine" else 1  # else it is not known which ranks are on one
    request = memory.MemoryRequest(
        opts.target.name, on_cpu, [devices], opts.blocks, None, choosing=True, machines=machines
    )
    say = sayer(plan.verbosity)
    try:
        with _no_input():  # it is the run's
            forecast = memory.forecast_memory(request, lambda text: say(f"--strategy auto: {text}"))
    except DuokaError:
        say("--strategy auto: the strategy cannot be chosen; --strategy ddp or fsdp starts the script at once")
        raise
    need = forecast.advice(devices.number)
    if need is None:
        raise AskedError(
            f"--strategy auto: {memory.verdict(forecast)}; --strategy fsdp starts the script all the same"
        )
    return replace(
        plan,
        strategy=need.layout.strategy,
        checkpoint_activations=need.layout.checkpoints,
        cpu_offload=need.layout.offloads,
        notes=(*plan.notes, memory.choice(forecast, need)),
    )


@contextmanager
def _no_input() -> Iterator[None]:
    """Let the script find its standard input empty, which it reads when it is run."""
    kept = os.dup(0)  # the file itself, not sys.stdin: workers inherit it, and programs that they start
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(nothing)
        os.close(kept)
