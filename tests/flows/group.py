"""Scripts with several ranks, and runs of them."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from tests.flows.flow import Flow, Result, Running

GROUP = """\
import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, whatever the others write

def barrier():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size

barrier()
"""


def group(flow: Flow, then: str, name: str = "script.py") -> Path:
    """A script whose ranks pass one barrier, and then do `then`."""
    return flow.write(name, GROUP + textwrap.dedent(then))


def run(flow: Flow, script: Path, *args: str, workers: int = 2, options: tuple[str, ...] = ()) -> Result:
    return flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", *options, script, *args])


def start(flow: Flow, script: Path, *args: str, workers: int = 2, options: tuple[str, ...] = ()) -> Running:
    return flow.start(["run", "--quiet", "--devices", f"cpu:{workers}", *options, script, *args])


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.02)
