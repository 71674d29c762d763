"""A Slurm of two nodes: real daemons, in network namespaces of this machine. Only root can make it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.flows.flow import surroundings

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "ip", "nsenter", "unshare")
NET = "10.214.78"
SETTINGS = """\
ClusterName=duoka
SlurmctldHost=dkctl({net}.254)
SlurmctldPort=26817
SlurmdPort=26818
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MpiDefault=none
SchedulerParameters=requeue_delay=1,sched_interval=2,bf_interval=2
NodeName=dkn0 NodeAddr={net}.1 CPUs={cores} State=UNKNOWN
NodeName=dkn1 NodeAddr={net}.2 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no cluster can be made; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {', '.join(lacking)} (apt-get install slurm-wlm iproute2)" if lacking else ""


class Cluster:
    """folder: where its files are. env: for its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        env = surroundings({"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONHASHSEED": "0"})
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        self.env = env | {"XDG_CONFIG_HOME": str(folder / "settings")}

    def run(self, *words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command of Slurm's, to its end."""
        found = subprocess.run(words, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=110)
        assert found.returncode == code, found
        return found

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """The cluster, for as long as the context lasts."""
    made = Cluster(folder)
    cores = len(os.sched_getaffinity(0))
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, net=NET, cores=cores))
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")
    hosts = "".join(f"{NET}.{number + 1} dkn{number}\n" for number in range(2))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}{NET}.254 dkctl\n")
    for name in ("state", "spool-dkn0", "spool-dkn1", "cgroup"):
        (folder / name).mkdir()
    try:
        _network()
        _start(made, "dkctl", "slurmctld")
        for node in ("dkn0", "dkn1"):
            _start(made, node, "slurmd", f"nsenter --net=/run/netns/{node}")
        made.until(lambda: made.run("sinfo", "--noheader", "-o", "%D %t", cwd=folder).stdout == "2 idle\n")
        yield made
    finally:
        for path in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        for number, node in enumerate(("dkn0", "dkn1")):
            # Deleting a namespace removes its link only later, perhaps after the next test has made it again.
            subprocess.run(["ip", "link", "delete", f"dkport{number}"], capture_output=True)
            subprocess.run(["ip", "netns", "delete", node], capture_output=True)
        subprocess.run(["ip", "link", "delete", "dkbridge"], capture_output=True)


def _start(made: Cluster, host: str, daemon: str, within: str = "") -> None:
    """As a host with a name and a list of names of its own."""
    become = f"mount --bind {made.folder}/hosts /etc/hosts && hostname {host} && exec {daemon}"
    words = [*within.split(), "unshare", "--uts", "--mount", "sh", "-c", become]
    subprocess.run(words, env=made.env, check=True, capture_output=True)


def _network() -> None:
    _ip("link add dkbridge type bridge", f"address add {NET}.254/24 dev dkbridge", "link set dkbridge up")
    for number, node in enumerate(("dkn0", "dkn1")):
        _ip(f"netns add {node}", f"link add dkport{number} type veth peer name eth0 netns {node}")
        _ip(f"link set dkport{number} master dkbridge up", f"-n {node} address add {NET}.{number + 1}/24 dev eth0")
        _ip(f"-n {node} link set eth0 up", f"-n {node} link set lo up")


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)
