"""Connect the commands of a run on several machines, and compare their settings."""

from __future__ import annotations

import importlib.metadata
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from duoka import __version__, environment
from duoka.errors import MISSING, AskedError, DuokaError
from duoka.launchers.channel import LOST, Channel, open_channel
from duoka.launchers.hello import Hello, SettingsDiffer
from duoka.launchers.machines import SeveralMachines, SingleMachine
from duoka.network.interfaces import interface_of
from duoka.network.keys import Key, key_of
from duoka.plan import Plan, joined
from duoka.script.files import sources
from duoka.system.machine import machine_name

REPORT_WAIT_AFTER = 3.0  # seconds of waiting after which a line says for whom
WITHOUT_KEY = (
    "the machines share no key, so anybody who reaches this port can take part in the run and read what it "
    "computes; give all machines the same DUOKA_KEY or --key-file to prevent that"
)


@contextmanager
def join_machines(plan: Plan, say: Callable[[str], None]) -> Iterator[tuple[Plan, str, SingleMachine]]:
    """Connect to the other machines, if there are any; yield the completed plan, a name for the run, and the others.

    say: prints a line.

    Raises:
        TimedOut: a machine did not connect in time.
        AskedError: the machines were started with different settings.
    """
    if plan.machines.count == 1:
        yield plan, secrets.token_hex(8), SingleMachine()
        return
    key = key_of(plan.machines, plan.key_file)
    if not key.is_given and plan.machines.number == 0:
        say(WITHOUT_KEY)
    channel, settings = open_channel(plan.machines, key), _settings(plan)
    try:
        hellos = _connect(channel, plan, settings, say)
        plan = replace(plan, machines=replace(plan.machines, host=channel.host))
        workers, names, hosts = zip(*((one.workers, one.name, one.host) for one in hellos), strict=True)
        plan = joined(plan, workers, names, hosts)
        yield plan, hellos[0].run, SeveralMachines(channel, plan, interface_of(channel.address), hellos[0].run)
    except DuokaError as error:
        channel.send(LOST, str(error))
        raise
    finally:
        channel.close()


def _connect(channel: Channel, plan: Plan, settings: Mapping[str, Any], say: Callable[[str], None]) -> list[Hello]:
    """Connect. Each machine names a differing setting with its own value: values are not sent to others."""
    try:
        return channel.connect(_hello(plan, channel.key, settings), plan.timeout, _report_long_waits(say))
    except SettingsDiffer as error:
        here = (
            f"{settings.get(error.what, MISSING)!r} on {plan.machines.called(plan.machines.number)} ({_host_name()})"
        )
        other = plan.machines.called(error.other)
        raise AskedError(
            f"all machines must have the same settings: {error.what} is {here}, but differs on {other}"
        ) from None


def _report_long_waits(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that prints its text once the same text has been passed for 3 s."""
    since, printed = dict[str, float](), set[str]()

    def waits(text: str) -> None:
        if time.monotonic() - since.setdefault(text, time.monotonic()) > REPORT_WAIT_AFTER and text not in printed:
            printed.add(text)
            say(text)

    return waits


def _hello(plan: Plan, key: Key, settings: Mapping[str, Any]) -> Hello:
    device = plan.devices[0].uuid if plan.machines.each == "rank" else ""
    return Hello(
        name=_host_name(),
        machines=plan.machines.count,
        each=plan.machines.each,
        workers=plan.workers,
        run=secrets.token_hex(8),
        host=key.sign(b"host", machine_name().encode()),
        device=device and key.sign(b"device", device.encode()),
        settings={
            what: key.sign(b"fact", what.encode(), json.dumps(value).encode()) for what, value in settings.items()
        },
    )


def _host_name() -> str:
    return socket.gethostname()


def _settings(plan: Plan) -> dict[str, Any]:
    """Return what must be equal on all machines, by the name used in messages."""
    files = {f"the content of {one.shown}": one.digest[:12] for one in sources(plan.target)}
    return {
        "the version of duoka": __version__,
        "the version of torch": importlib.metadata.version("torch").partition("+")[0],
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "PYTHONHASHSEED": environment.variable("PYTHONHASHSEED"),
        "the script": [plan.target.name] if plan.target.is_module else [Path(plan.target.name).name],
        "the script's argument list": list(plan.target.args),
        **files,
        "the script's kind": plan.kind.value,
        "--strategy": plan.strategy,
        "--shares": plan.shares,
        "--rows": [plan.weights, plan.measures_rows],
        "--batch-norm": plan.batch_norm,
        "--randomness": plan.randomness,
        "--loading": plan.loading,
        "--blocks": list(plan.blocks),
        "--checkpoint-activations": plan.checkpoint_activations,
        "--cpu-offload": plan.cpu_offload,
        "--row-independent": list(plan.row_independent),
        "--timeout": plan.timeout,
        "--step-timeout": plan.step_timeout,
        "--restarts": plan.restarts,
        "--threads": plan.threads if plan.strategy == "exact" else None,
        "the type of the devices": plan.devices[0].type,
    }
