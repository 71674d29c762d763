"""Before a run on several machines: their commands meet, and see that they were started to do the same."""

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
from duoka.keys import Key, key_of
from duoka.launchers.hello import Differs, Hello
from duoka.launchers.machines import Alone, Several
from duoka.launchers.talk import LOST, Talk, begin
from duoka.machine_name import machine_name
from duoka.network import device_of
from duoka.plan import Plan, joined
from duoka.script.files import sources

TO_SAY = 3.0  # seconds after which it is said for whom this machine waits
WITHOUT_KEY = (
    "the machines have no key in common, so whoever reaches this port can take part in the run and read what it "
    "computes; DUOKA_KEY or --key-file, the same on all, closes it"
)


@contextmanager
def together(plan: Plan, say: Callable[[str], None]) -> Iterator[tuple[Plan, str, Alone]]:
    """Meet the other machines, if there are any: the plan, completed; a name for the run; the others.

    say: shows a line.

    Raises:
        TimedOut: not all came.
        AskedError: they were not started to do the same.
    """
    if plan.machines.count == 1:
        yield plan, secrets.token_hex(8), Alone()
        return
    key = key_of(plan.machines, plan.key_file)
    if not key.is_given and plan.machines.number == 0:
        say(WITHOUT_KEY)
    talk, facts = begin(plan.machines, key), _facts(plan)
    try:
        hellos = _met(talk, plan, facts, say)
        plan = replace(plan, machines=replace(plan.machines, host=talk.host))
        workers, names, hosts = zip(*((one.workers, one.name, one.host) for one in hellos), strict=True)
        plan = joined(plan, workers, names, hosts)
        yield plan, hellos[0].run, Several(talk, plan, device_of(talk.address), hellos[0].run)
    except DuokaError as error:
        talk.say(LOST, str(error))
        raise
    finally:
        talk.close()


def _met(talk: Talk, plan: Plan, facts: Mapping[str, Any], say: Callable[[str], None]) -> list[Hello]:
    """Meet. What differs is told in each machine's own words: what a script is given is not sent to others."""
    try:
        return talk.meet(_hello(plan, talk.key, facts), plan.timeout, _patiently(say))
    except Differs as error:
        here = f"{facts.get(error.what, MISSING)!r} on {plan.machines.called(plan.machines.number)} ({_host_name()})"
        other = plan.machines.called(error.other)
        raise AskedError(f"all machines must do the same: {error.what} is {here}, and is not on {other}") from None


def _patiently(say: Callable[[str], None]) -> Callable[[str], None]:
    """Tells for whom this machine waits, where it takes long."""
    since, told = dict[str, float](), set[str]()

    def waits(text: str) -> None:
        if time.monotonic() - since.setdefault(text, time.monotonic()) > TO_SAY and text not in told:
            told.add(text)
            say(text)

    return waits


def _hello(plan: Plan, key: Key, facts: Mapping[str, Any]) -> Hello:
    device = plan.devices[0].uuid if plan.machines.each == "rank" else ""
    return Hello(
        name=_host_name(),
        machines=plan.machines.count,
        each=plan.machines.each,
        workers=plan.workers,
        run=secrets.token_hex(8),
        host=key.sign(b"host", machine_name().encode()),
        device=device and key.sign(b"device", device.encode()),
        facts={what: key.sign(b"fact", what.encode(), json.dumps(value).encode()) for what, value in facts.items()},
    )


def _host_name() -> str:
    return socket.gethostname()


def _facts(plan: Plan) -> dict[str, Any]:
    """What must be the same on all machines, by the words in which it is told."""
    files = {f"the content of {one.shown}": one.digest[:12] for one in sources(plan.target)}
    return {
        "the version of duoka": __version__,
        "the version of torch": importlib.metadata.version("torch").partition("+")[0],
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "PYTHONHASHSEED": environment.variable("PYTHONHASHSEED"),
        "the script": [plan.target.name] if plan.target.is_module else [Path(plan.target.name).name],
        "what the script is given": list(plan.target.args),
        **files,
        "the script's kind": plan.kind.value,
        "--strategy": plan.strategy,
        "--shares": plan.shares,
        "--batch-norm": plan.batch_norm,
        "--randomness": plan.randomness,
        "--loading": plan.loading,
        "--row-independent": list(plan.row_independent),
        "--timeout": plan.timeout,
        "--step-timeout": plan.step_timeout,
        "--restarts": plan.restarts,
        "--threads": plan.threads if plan.strategy == "exact" else None,
        "the type of the devices": plan.devices[0].type,
    }
