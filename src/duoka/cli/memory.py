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

    plan, names, counts, limits = _decided(opts, limit)
    if machines > 1:
        names, counts = [on_machines(name, machines) for name in names], [count * machines for count in counts]
    request = memory.MemoryRequest(
        opts.target.name, plan, names, counts, limits, opts.blocks, opts.log_dir, machines=machines
    )
    forecast = memory.forecast_memory(request, sayer(shown))
    click.echo(memory.as_data(forecast) if shown == "json" else memory.as_text(forecast, shown))
    return 0


def on_machines(devices: str, machines: int) -> str:
    """Name the devices of several machines."""
    return f"{devices} on each of {machines} machines"


def _decided(opts: Options, limit: int | None) -> tuple[Plan, list[str], list[int], list[int | None]]:
    """Return the plan for one CPU worker, and the names, numbers and memory of the devices to forecast for.

    Raises AskedError if the script calls torch.distributed itself.
    """
    seen, threads = inventory.read(parse(opts.devices).type), environment.threads()
    opts = replace(opts, blocks=())  # given with fsdp alone

    def decided(devices: str) -> Plan:
        return decide(replace(opts, devices=devices), seen, threads)

    most = decided(opts.devices)
    if most.kind is Kind.DISTRIBUTED:
        raise own_ranks_error(
            most, "and how each computes", "a run on one device does not show its memory on several"
        )
    counts = [*powers_below(len(most.devices)), len(most.devices)]
    devices = [most.devices[:count] for count in counts]
    limits = [memory_of_each(some, seen) if limit is None else limit for some in devices]
    return decided("cpu:1"), [replace(most, devices=some).device_words for some in devices], counts, limits


def powers_below(number: int) -> Iterator[int]:
    """Yield the powers of two below a number."""
    power = 1
    while power < number:
        yield power
        power *= 2


def with_strategy_that_fits(plan: Plan, opts: Options, size: int | None) -> Plan:
    """Return a plan of the strategy auto with the first strategy that fits the devices.

    size: bytes of each device's memory; None: as the devices say.

    Raises:
        AskedError: no strategy fits.
        DuokaError: the forecast of the script's memory failed.
    """
    from duoka.forecasting import memory  # imports torch; a plan is made without it

    seen = inventory.read(plan.devices[0].type)
    limit = memory_of_each(plan.devices, seen) if size is None else size
    alone = replace(opts, strategy="", devices="cpu:1", blocks=(), restarts=0, report=None, machines=ONE_MACHINE)
    on_cpu = decide(alone, seen, environment.threads())
    count, name = plan.machines.count, plan.device_words
    devices = len(plan.devices) * count
    request = memory.MemoryRequest(
        opts.target.name,
        on_cpu,
        [name if count == 1 else on_machines(name, count)],
        [devices],
        [limit],
        opts.blocks,
        None,
        choosing=True,
        machines=count if plan.machines.each == "machine" else 1,  # else it is not known which ranks are on one
    )
    say = sayer(plan.verbosity)
    try:
        with _no_input():
            forecast = memory.forecast_memory(request, lambda text: say(f"--strategy auto: {text}"))
    except DuokaError:
        say("--strategy auto: the strategy cannot be chosen; --strategy ddp or fsdp starts the script at once")
        raise
    need = forecast.advice(devices)
    if need is None:
        raise AskedError(
            f"--strategy auto: {memory.verdict(forecast)}; --strategy fsdp starts the script all the same"
        )
    layout = need.layout
    notes = (*plan.notes, memory.choice(forecast, need))
    checkpoints, offloads = layout.checkpoints, layout.offloads
    return replace(
        plan, strategy=layout.strategy, checkpoint_activations=checkpoints, cpu_offload=offloads, notes=notes
    )


@contextmanager
def _no_input() -> Iterator[None]:
    """Let the script find its standard input empty, which it reads when it is run."""
    kept = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(nothing)
        os.close(kept)
