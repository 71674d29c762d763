"""Plans and workers made by hand."""

from __future__ import annotations

import os
import socket
from typing import Any

from duoka.hardware.gpu import Device
from duoka.launchers.workers import Worker
from duoka.planning.plan import Kind, Plan
from duoka.script import Target
from duoka.supervision.ending import Ending, How

CPU = Device("cpu")
NO_STACKS = os.memfd_create("no stacks")


def plan(**given: Any) -> Plan:
    """A plan for two workers on the CPU, other than given."""
    usual: dict[str, Any] = {
        "target": Target("train.py"),
        "kind": Kind.PLAIN,
        "kind_reason": "",
        "kind_can_be_either": False,
        "devices": (CPU, CPU),
        "strategy": "ddp",
        "batch_norm": "whole",
        "randomness": "whole",
        "loading": "auto",
        "threads": None,
        "timeout": 600.0,
        "step_timeout": None,
        "log_dir": None,
        "verbosity": "normal",
    }
    return Plan(**usual | given)


def ending(rank: int = 0, how: How = "returned", code: int = 0, time: float = 0.0, **given: Any) -> Ending:
    """Return the record of how a script ended."""
    return Ending(how, code, time, **given)


def raised(rank: int, error: str = "ValueError: boom", time: float = 0.0, code: int = 1, **given: Any) -> Ending:
    """A script that raised."""
    trace = f"Traceback of rank {rank}\n{error}\n"
    usual = {"kind": error.partition(":")[0], "error": error, "trace": trace, "full_trace": f"whole {trace}"}
    return ending(rank, "raised", code, time, **usual | given)


def lost(rank: int, time: float = 0.0) -> Ending:
    """A script that was cut off from another rank."""
    return raised(rank, "RuntimeError: Connection closed by peer", time, consequence=True)


def worker(rank: int, end: Ending | None = None, status: int | None = None, **given: Any) -> Worker:
    """A worker as the command process sees it. Its process is this one, its pipe leads nowhere."""
    with socket.socket() as pipe:
        usual: dict[str, Any] = {"pid": os.getpid(), "pipe": pipe, "stacks": NO_STACKS, "own_log": rank > 0}
    return Worker(rank, ending=end, status=status, **usual | given)
