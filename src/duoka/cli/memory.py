"""`duoka forecast --memory`: the peak memory of a device under each strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import click

from duoka.cli.trial import own_ranks_error, sayer, to_the_end
from duoka.devices import inventory
from duoka.devices.memory import memory_of_each
from duoka.devices.spec import parse
from duoka.errors import OptionError
from duoka.planning.options import Options, memory_size
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
    from duoka.forecasting.memory.forecast import MemoryRequest  # imports torch; a plan is made without it
    from duoka.forecasting.memory.forecast import forecast_memory as start
    from duoka.forecasting.memory.showing import as_data, as_text

    plan, names, counts, limits = _decided(opts, limit)
    if machines > 1:
        names, counts = [on_machines(name, machines) for name in names], [count * machines for count in counts]
    request = MemoryRequest(
        opts.target.name, plan, names, counts, limits, opts.blocks, opts.log_dir, machines=machines
    )
    found = start(request, sayer(shown))
    click.echo(as_data(found) if shown == "json" else as_text(found, shown))
    return 0


def on_machines(devices: str, machines: int) -> str:
    """Name the devices of several machines."""
    return f"{devices} on each of {machines} machines"


def _decided(opts: Options, limit: int | None) -> tuple[Plan, list[str], list[int], list[int | None]]:
    """Return the plan for one CPU worker, and the names, numbers and memory of the devices to forecast for.

    Raises:
        AskedError: the script calls torch.distributed itself.
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
