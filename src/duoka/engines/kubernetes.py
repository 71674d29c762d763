"""Kubernetes: pods of an Indexed Job, a JobSet or Kubeflow. A pod is a machine."""

from __future__ import annotations

import re
import socket

from duoka.engines.task import DEFAULT_PORT, Task
from duoka.errors import MISSING, OptionError
from duoka.system import environment

HOW = "a pod with the command duoka run train.py"


def kubeflow() -> Task | None:
    """Read Kubeflow's variables: PET_* of its trainer, or RANK and WORLD_SIZE of a PyTorchJob, which count pods.

    Raises OptionError if the number of pods may change, which needs torchrun.
    """
    nodes, rank = environment.variable("PET_NNODES"), environment.number("PET_NODE_RANK")
    if nodes is not None and not nodes.isdecimal():
        hint = "torchrun -m duoka run train.py takes task in it; a fixed number of replicas needs no torchrun"
        raise OptionError("PET_NNODES", nodes, "one number", hint)
    if nodes is not None and rank is not None:
        port = environment.number("PET_MASTER_PORT") or DEFAULT_PORT
        address = environment.variable("PET_MASTER_ADDR"), port
        return _task(rank, int(nodes), address if address[0] else environment.master(port))
    rank, count = environment.number("RANK"), environment.number("WORLD_SIZE")
    if environment.variable("KUBERNETES_SERVICE_HOST") is None or rank is None or count is None:
        return None
    return _task(rank, count, environment.master(DEFAULT_PORT))


def indexed_job(count: int | None) -> Task | None:
    """Read the variables of an Indexed Job's pod. count: `--machines`, the number of pods, which no variable holds.

    Raises OptionError if `--machines` was not given; or the pods have no host names.
    """
    index = environment.number("JOB_COMPLETION_INDEX")
    if index is None or count == 1:
        return None
    if count is None:
        hint = "--machines 4 makes 4 pods one run; --machines 1 makes each pod a run of its own"
        raise OptionError("--machines", MISSING, "given in a pod of an Indexed Job", hint)
    host, port = environment.master(DEFAULT_PORT) or (_first_pod(), DEFAULT_PORT)
    return _task(index, count, (host, port))


def _first_pod() -> str:
    """Return the first pod's host name: this pod's with index 0, under their headless service."""
    name = socket.getfqdn()
    match = re.match(r"([^.]*-)\d+(?=\.|$)", name)
    if match is None or "." not in name:
        hint = "give the pods a headless service (subdomain: ...), or set MASTER_ADDR"
        raise OptionError("the pod's name", name, "one that other pods can reach, like train-0.train", hint)
    return f"{match[1]}0{name[match.end() :]}"


def _task(rank: int, count: int, address: tuple[str | None, int] | None) -> Task:
    host, port = address or ("", 0)
    return Task("Kubernetes", rank, count, machines=count, host=host or "", port=port, how=HOW)
