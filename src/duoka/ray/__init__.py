"""`duoka.ray.launch`: a function or a script on the nodes of a Ray cluster, as one run.

It starts one `duoka run` on each node, and collects what they return; in their workers `call.py` calls the function.
Ray is an optional dependency: it is imported when `launch` is called.

A Ray task (`_gang`) reserves the nodes with a placement group and starts a command on each. The commands
connect and watch each other as on any machines. If one fails, all end and the task raises an error: Ray may then
retry it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from duoka import engines
from duoka.errors import DuokaError, OptionError, TimedOut, WorkerFailed
from duoka.hardware.spec import parse
from duoka.origins.process import this_process
from duoka.planning.options import MOST_MACHINES, waiting
from duoka.system import environment

__all__ = ["launch"]

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
    # The paths outside of the call, as unpickling it imports the modules that it names.
    call = pickle.dumps((sys.path, ray.cloudpickle.dumps((what, args, kwargs)))) if callable(what) else b""
    kind = ["--kind", "api"] if callable(what) else []
    job = Job(("--threads", "1", *options, *kind, *words), call, os.getcwd(), bundle)
    again = [WorkerFailed, ray.exceptions.RayError] if retries else False
    # A task without resources of its own: those of the nodes are the placement group's, made anew for each attempt.
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

    Raises OptionError if `devices` names devices, which Ray chooses, or kinds that it does not know.
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
    numbers: list[tuple[str, Any, int, int]] = [
        ("nodes", nodes, 1, MOST_MACHINES),
        ("retries", retries, 0, MOST_RETRIES),
    ]
    for name, number, least, most in numbers:
        if not isinstance(number, int) or not least <= number <= most:
            raise OptionError(name, number, f"a whole number from {least} to {most}")
    if not callable(what) and kwargs:
        name, value = next(iter(kwargs.items()))
        raise OptionError(name, value, "left out for a script", "pass its arguments as strings after its path")


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
        rendezvous = ray.get(_task(group, 0, {})(free_port).remote())  # on the node of machine 0
        key = secrets.token_hex(32)
        commands = [_task(group, node, job.bundle)(run_command) for node in range(nodes)]
        running = [command.remote(job, node, nodes, rendezvous, key) for node, command in enumerate(commands)]
        return results(_ends(ray, running))
    finally:
        groups.remove_placement_group(group)


def _task(group: Any, node: int, bundle: dict[str, float]) -> Any:
    """Return the decorator of a task on one node of the group."""
    scheduling = import_module("ray.util.scheduling_strategies")
    strategy = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
    cpus, gpus = bundle.get("CPU", 0), bundle.get("GPU", 0)
    # No retries: one command alone cannot join a run again. `_gang` is what Ray may start again.
    return _library().remote(num_cpus=cpus, num_gpus=gpus, max_retries=0, scheduling_strategy=strategy)


def _shown(bundle: dict[str, float]) -> str:
    return f"{bundle.get('CPU', 0):g} CPUs" + (f" and {bundle['GPU']:g} GPUs" if "GPU" in bundle else "")


def _ends(ray: Any, running: list[Any]) -> list[CommandResult]:
    """Wait for all commands; after the first failure for END_WAIT seconds: then the placement group ends the rest."""
    ends: dict[Any, CommandResult] = {}
    left, done = list(running), list(running)
    try:
        while left and done:
            failed = any(end.code for end in ends.values())
            done, left = ray.wait(left, timeout=END_WAIT if failed else None)
            ends |= {task: _end(ray, task, running.index(task)) for task in done}
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

    Raises WorkerFailed if a command failed: it names the one that a cause is known of, else the first that ended.
    """
    failed = [end for end in ends if end.code]
    if failed:
        first = min(failed, key=lambda end: (not end.error, not end.lost))  # others end because of it, and say less
        raise WorkerFailed(first.description())
    by_rank = {rank: result for end in ends for rank, result in end.results.items()}
    return [by_rank[rank] for rank in sorted(by_rank)]


# On the nodes.


@dataclass(frozen=True)
class Job:
    """The work of each node."""

    words: tuple[str, ...]  # after `duoka run`
    call: bytes  # the pickled function
    folder: str  # working directory
    bundle: dict[str, float]  # resources of each node

    def command(self, node: int, nodes: int, rendezvous: str) -> list[str]:
        """Return the command of one node. rendezvous: where the commands of several connect."""
        devices = "gpu" if "GPU" in self.bundle else f"cpu:{self.bundle['CPU']:g}"
        # Also for one: else variables of an engine that has started Ray, such as Slurm, would count.
        machines = ["--machines", str(nodes)]
        machines += ["--machine", str(node), "--rendezvous", rendezvous] if nodes > 1 else []
        return [sys.executable, "-m", "duoka", "run", "--devices", devices, *machines, *self.words]


@dataclass(frozen=True)
class CommandResult:
    """The result of a node's command."""

    node: int
    code: int  # its exit code
    results: dict[int, bytes] = field(default_factory=dict)  # pickled, by rank
    error: str = ""  # traceback of the function
    lost: str = ""  # why Ray lost the command
    host: str = ""

    def description(self) -> str:
        """Return a description of the failure."""
        where = f"node {self.node}" + (f" ({self.host})" if self.host else "")
        if self.lost:
            return f"Ray has lost the command on {where}: {self.lost}"
        detail = f":\n\n{self.error}" if self.error else "; its report is in the output of Ray's tasks"
        return f"duoka run on {where} ended with exit code {self.code}{detail}"


def free_port() -> str:
    """Return this node's address and a port that is free now."""
    with socket.create_server(("", 0)) as server:
        address: str = import_module("ray.util").get_node_ip_address()
        host = f"[{address}]" if ":" in address else address
        return f"{host}:{server.getsockname()[1]}"


def run_command(job: Job, node: int, nodes: int, rendezvous: str, key: str) -> CommandResult:
    """Run the command of this node to its end. If Ray cancels the task, the command gets SIGTERM, so it may save."""
    with tempfile.TemporaryDirectory(prefix="duoka-ray-") as folder:
        Path(folder, "call").write_bytes(job.call)
        variables = {"DUOKA_KEY": key, "DUOKA_CALL": folder, "DUOKA_STARTED_BY": str(os.getpid())}
        command = job.command(node, nodes, rendezvous)
        with subprocess.Popen(command, env=environment.inherited(variables), cwd=job.folder) as process:
            try:
                code = process.wait()
            except BaseException:  # Ray raises KeyboardInterrupt in a task that it cancels
                process.terminate()
                raise  # `with` waits for the end of the process before
        results = {int(path.suffix[1:]): path.read_bytes() for path in Path(folder).glob("result.*")}
        errors = [path.read_text() for path in sorted(Path(folder).glob("error.*"))]
    return CommandResult(node, code, results, "".join(errors[:1]), host=socket.gethostname())
