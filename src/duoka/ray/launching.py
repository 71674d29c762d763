"""Start one `duoka run` on each of several nodes of a Ray cluster, and collect what they return.

A Ray task (`_gang`) reserves the nodes with a placement group and starts a command on each. The commands
connect and watch each other as on any machines. If one fails, all end and the task raises an error: Ray may then
retry it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from duoka import engines
from duoka.devices.spec import parse
from duoka.errors import DuokaError, OptionError, TimedOut, WorkerFailed
from duoka.options import MOST_MACHINES, waiting
from duoka.process import this_process
from duoka.ray.node import CommandResult, Job, free_port, run_command

MOST_RETRIES = 1000
END_WAIT = 60.0  # seconds in which commands end by themselves once another one has failed


def launch(
    what: Callable[..., Any] | str | Path,
    *args: Any,
    devices: str | int = "auto",
    nodes: int = 1,
    retries: int = 0,
    wait: str | float = "10m",
    options: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Run a function or a script on the devices of several nodes of a Ray cluster, as one run of duoka.

    Args:
        what: a function, which begins with `duoka.start()`; or the path of a script, which all nodes see.
        *args: arguments of the function, or of the script.
        devices: of each node: "auto" (one GPU), 2 (that many GPUs), or "cpu:2". Ray chooses which.
        nodes: number of different nodes.
        retries: number of times that Ray may start everything again after a failure of any kind.
        wait: time until Ray has found the nodes, in seconds or like "30m".
        options: further options of `duoka run`, such as ["--strategy", "exact"].
        **kwargs: keyword arguments of the function.

    Returns:
        The function's results, in the order of ranks; for a script an empty list.

    Raises:
        OptionError: a value is not allowed, or Ray is not installed.
        TimedOut: Ray has not found the nodes in time.
        WorkerFailed: the run failed; with the traceback of the function, if it raised.
    """
    bundle = resources(devices)
    _check(what, nodes, retries, kwargs)
    ray = _library()
    words = ["-m", "duoka.ray.call"] if callable(what) else [str(Path(what).resolve()), *map(str, args)]
    call = pickle.dumps((sys.path, ray.cloudpickle.dumps((what, args, kwargs)))) if callable(what) else b""
    kind = ["--kind", "api"] if callable(what) else []
    job = Job(("--threads", "1", *options, *kind, *words), call, os.getcwd(), bundle)
    again = [WorkerFailed, ray.exceptions.RayError] if retries else False
    gang = ray.remote(num_cpus=0, max_retries=retries, retry_exceptions=again)(_gang)
    running = gang.remote(job, nodes, waiting(wait))
    try:
        return [ray.cloudpickle.loads(result) for result in ray.get(running)]
    except KeyboardInterrupt:
        ray.cancel(running)
        ray.wait([running], timeout=END_WAIT)  # the end of this program would kill the commands
        raise
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, DuokaError) else WorkerFailed(str(error)) from None


def resources(devices: str | int) -> dict[str, float]:
    """Return what a node must have, in Ray's words: a CPU for each worker, and its GPU.

    Raises:
        OptionError: `devices` names devices, which Ray chooses, or kinds that it does not know.
    """
    asked = parse(str(devices))
    if asked.type == "cpu" and asked.count is not None:
        return {"CPU": asked.count}
    if asked.type != "auto" or asked.pick is not None:
        hint = "Ray chooses the GPUs of each node"
        raise OptionError("devices", devices, "auto, a number of GPUs like 2, cpu, or cpu:2", hint)
    return {"CPU": asked.count or 1, "GPU": asked.count or 1}


def _check(what: object, nodes: int, retries: int, kwargs: dict[str, Any]) -> None:
    engines.refuse_copies("duoka.ray.launch")
    if this_process().origin is not None:
        hint = "start this program with python"
        raise OptionError("duoka.ray.launch", "called in a worker", "called outside of workers", hint)
    _check_number("nodes", nodes, 1, MOST_MACHINES)
    _check_number("retries", retries, 0, MOST_RETRIES)
    if not callable(what) and kwargs:
        name, value = next(iter(kwargs.items()))
        raise OptionError(name, value, "left out for a script", "pass its arguments as strings after its path")


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise OptionError(name, value, f"a whole number from {least} to {most}")


def _library() -> Any:
    try:
        import_module("ray.cloudpickle")
        return import_module("ray")
    except ModuleNotFoundError as error:
        hint = "pip install ray, or pip install 'duoka[ray]'"
        raise OptionError("duoka.ray.launch", "called", "called where Ray is installed", hint) from error


def _gang(job: Job, nodes: int, wait: float) -> list[bytes]:
    """Run one attempt, and return the pickled results in the order of ranks. Runs as a task of Ray's."""
    ray = _library()
    groups = import_module("ray.util.placement_group")
    group = groups.placement_group([job.bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    try:
        if not group.wait(wait):
            raise TimedOut(
                f"Ray has not found {nodes} different nodes with {_shown(job.bundle)} each in {wait:g} s; "
                f"the cluster has {len([node for node in ray.nodes() if node['Alive']])} with altogether "
                f"{_shown(ray.cluster_resources())}, of which {_shown(ray.available_resources())} are free"
            )
        place = ray.get(_task(group, 0, {})(free_port).remote())
        key = secrets.token_hex(32)
        run = [_task(group, node, job.bundle)(run_command) for node in range(nodes)]
        return results(_ends(ray, [one.remote(job, node, nodes, place, key) for node, one in enumerate(run)]))
    finally:
        groups.remove_placement_group(group)


def _task(group: Any, node: int, bundle: dict[str, float]) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator of a task on one node of the group."""
    scheduling = import_module("ray.util.scheduling_strategies")
    place = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
    cpus, gpus = bundle.get("CPU", 0), bundle.get("GPU", 0)
    decorator: Any = _library().remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy=place)
    return decorator  # type: ignore[no-any-return]


def _shown(bundle: dict[str, float]) -> str:
    return f"{bundle.get('CPU', 0):g} CPUs" + (f" and {bundle['GPU']:g} GPUs" if "GPU" in bundle else "")


def _ends(ray: Any, running: list[Any]) -> list[CommandResult]:
    """Wait for all commands; after the first failure for END_WAIT seconds: then the placement group ends the rest."""
    ends: dict[Any, CommandResult] = {}
    left = list(running)
    try:
        while left:
            failed = any(one.code for one in ends.values())
            done, left = ray.wait(left, timeout=END_WAIT if failed else None)
            ends |= {one: _end(ray, one, running.index(one)) for one in done}
            if not done:
                break
    except KeyboardInterrupt:  # cancelled, and so are the commands' tasks
        ray.wait(running, num_returns=len(running), timeout=END_WAIT)
        raise
    return list(ends.values())


def _end(ray: Any, task: Any, node: int) -> CommandResult:
    try:
        ended: CommandResult = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        return CommandResult(node, 1, error=str(error))
    except ray.exceptions.RayError as error:
        return CommandResult(node, 1, lost=str(error).strip().partition("\n")[0])
    return ended


def results(ends: Sequence[CommandResult]) -> list[bytes]:
    """Return the results of all ranks, in their order.

    Raises:
        WorkerFailed: a command failed; the error names the one that a cause is known of, else the first that ended.
    """
    failed = [end for end in ends if end.code]
    if failed:
        first = min(failed, key=lambda end: (not end.error, not end.lost))
        raise WorkerFailed(first.description())
    found = {rank: result for end in ends for rank, result in end.results.items()}
    return [found[rank] for rank in sorted(found)]
