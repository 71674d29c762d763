"""`duoka run --strategy auto`: a forecast of memory chooses the strategy, then the run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from duoka.cli.memory import on_machines
from duoka.cli.trial import sayer, to_the_end
from duoka.devices import inventory
from duoka.devices.memory import memory_of_each
from duoka.errors import AskedError, DuokaError
from duoka.planning.options import ONE_MACHINE, Options
from duoka.planning.plan import Plan, decide
from duoka.system import environment


def run_chosen(plan: Plan, opts: Options, memory: int | None, start: Callable[[Plan], int]) -> int:
    """Choose the strategy of a plan, and start it; returns the exit code.

    memory: bytes of each device; None: as the devices say.

    Raises:
        AskedError: no strategy fits.
        DuokaError: the forecast of the script's memory failed.
    """
    return to_the_end(lambda: start(_chosen(plan, opts, memory)))


def _chosen(plan: Plan, opts: Options, memory: int | None) -> Plan:
    from duoka.forecasting.memory.forecast import MemoryRequest, forecast_memory  # imports torch
    from duoka.forecasting.memory.showing import choice, verdict

    seen = inventory.read(plan.devices[0].type)
    limit = memory_of_each(plan.devices, seen) if memory is None else memory
    alone = replace(opts, strategy="", devices="cpu:1", blocks=(), restarts=0, report=None, machines=ONE_MACHINE)
    on_cpu = decide(alone, seen, environment.threads())
    count, name = plan.machines.count, plan.device_words
    devices = len(plan.devices) * count
    request = MemoryRequest(
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
            found = forecast_memory(request, lambda text: say(f"--strategy auto: {text}"))
    except DuokaError:
        say("--strategy auto: the strategy cannot be chosen; --strategy ddp or fsdp starts the script at once")
        raise
    need = found.advice(devices)
    if need is None:
        raise AskedError(f"--strategy auto: {verdict(found)}; --strategy fsdp starts the script all the same")
    layout = need.layout
    notes = (*plan.notes, choice(found, need))
    return replace(plan, strategy=layout.strategy, checkpoint_activations=layout.checkpoints, notes=notes)


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
