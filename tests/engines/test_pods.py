"""Commands as the pods of docs/engines/kubernetes.md start them, on hosts with names of their own (long, root)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.flows.flow import ROOT, surroundings
from tests.flows.test_machines import KEY, PLAIN, SAME_HASHES, free_place

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts with names of their own"),
]
PAGE = (ROOT / "docs/engines/kubernetes.md").read_text()
NAMES = ["train-0", "train-1"]


def commands(kind: str) -> list[str]:
    """Return the commands of pods of this kind, from the page."""
    block = next(block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if f"kind: {kind}\n" in block)
    words = re.search(r"command: \[(.*?)\]", block)
    assert words is not None
    return [word.strip().strip('"') for word in words[1].split(",")]


def told(kind: str, number: int, port: str) -> dict[str, str]:
    if kind in ("Job", "JobSet"):
        return {"JOB_COMPLETION_INDEX": str(number), "MASTER_PORT": port}
    first = {"MASTER_ADDR": "train-0.train.default", "MASTER_PORT": port}
    if kind == "TrainJob":
        counts = {"PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "1"}
        return counts | {f"PET_{name}": text for name, text in first.items()}
    return first | {"RANK": str(number), "WORLD_SIZE": "2"}


@pytest.mark.parametrize("kind", ["Job", "JobSet", "PyTorchJob", "TrainJob"])
def test_pods_are_one_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    words = commands("PyTorchJob" if kind == "TrainJob" else kind)
    words[:1] = [sys.executable, "-m", "duoka"]
    port = free_place().partition(":")[2]
    running = []
    for number, name in enumerate(NAMES):
        env = surroundings(SAME_HASHES | KEY | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} | told(kind, number, port))
        running.append(pod(name, words, env, tmp_path))
    said = [one.communicate() for one in running]
    assert [one.returncode for one in running] == [0, 0], said
    (tmp_path / "losses.txt").unlink()
    env = surroundings(SAME_HASHES)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert [out for out, _ in said] == [alone.stdout, ""]
    assert "(set by Kubernetes)" in said[0][1]


def pod(name: str, words: list[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """A command on a host with this name, which finds its own full name and that of the first pod."""
    hosts = folder / f"hosts-{name}"
    pods = "".join(f"127.0.0.{number} {one}.train.default {one}\n" for number, one in enumerate(NAMES, 2))
    hosts.write_text(f"127.0.0.1 localhost\n{pods}")
    become = f'mount --bind {hosts} /etc/hosts && hostname {name} && exec "$@"'
    within = ["unshare", "--uts", "--mount", "sh", "-c", become, "-", *words]
    return subprocess.Popen(within, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
