"""`duoka run` on one node of a Ray cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from duoka import environment


@dataclass(frozen=True)
class Job:
    """The work of each node.

    words: after `duoka run`. call: the pickled function. folder: working directory. bundle: resources of each node.
    """

    words: tuple[str, ...]
    call: bytes
    folder: str
    bundle: dict[str, float]

    def command(self, node: int, nodes: int, place: str) -> list[str]:
        """Return the command of one node. place: where the commands of several connect."""
        devices = "gpu" if "GPU" in self.bundle else f"cpu:{self.bundle['CPU']:g}"
        # Also for one: else variables of an engine that has started Ray, such as Slurm, would count.
        machines = ["--machines", str(nodes)]
        rendezvous = ["--machine", str(node), "--rendezvous", place] if nodes > 1 else []
        return [sys.executable, "-m", "duoka", "run", "--devices", devices, *machines, *rendezvous, *self.words]


@dataclass(frozen=True)
class CommandResult:
    """The result of a node's command.

    code: its exit code. results: pickled, by rank. error: traceback of the function. lost: why Ray lost the command.
    """

    node: int
    code: int
    results: dict[int, bytes] = field(default_factory=dict)
    error: str = ""
    lost: str = ""
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


def run_command(job: Job, node: int, nodes: int, place: str, key: str) -> CommandResult:
    """Run the command of this node to its end. If Ray cancels the task, the command gets SIGTERM, so it may save."""
    with tempfile.TemporaryDirectory(prefix="duoka-ray-") as folder:
        Path(folder, "call").write_bytes(job.call)
        own = {"DUOKA_KEY": key, "DUOKA_CALL": folder, "DUOKA_STARTED_BY": str(os.getpid())}
        command = job.command(node, nodes, place)
        with subprocess.Popen(command, env=environment.inherited(own), cwd=job.folder) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
        results = {int(path.suffix[1:]): path.read_bytes() for path in Path(folder).glob("result.*")}
        errors = [path.read_text() for path in sorted(Path(folder).glob("error.*"))]
    return CommandResult(node, code, results, "".join(errors[:1]), host=socket.gethostname())
