"""torchrun's elastic agents: nodes join and are lost, and the run goes on with another number of ranks (long)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.flows.flow import surroundings
from tests.flows.test_machines import free_place

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts with names of their own"),
]

SCRIPT = """\
import time
import torch
import duoka
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=8)
saved = duoka.Checkpoint("saved", {"model": net, "optimizer": optimizer})
for epoch in saved.epochs(COUNT):
    for (x,) in loader:
        loss = net(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(PAUSE)
    print(epoch, f"{net.weight.square().sum().item():.5f}", flush=True)
"""
API = """\
import time
import torch
import duoka
run = duoka.start(seed=0)
net = run.model(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = run.loader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=8, shuffle=True)
saved = run.checkpoint("saved", model=net, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(COUNT):
    for (x,) in loader:
        loss = net(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(PAUSE)
    run.print(epoch, f"{net.weight.square().sum().item():.5f}", flush=True)  # an epoch may go on after its last batch
"""


class Agents:
    """torchrun's agents, each on a host of its own name."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        place = free_place()
        how = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d --rdzv-id job"
        how += " --local-addr 127.0.0.1"
        conf = "last_call_timeout=2,keep_alive_interval=1,heartbeat_timeout=10"
        self._words = ["torchrun", *how.split(), "--rdzv-endpoint", place, "--rdzv-conf", conf, *words]
        self._folder = folder
        self._env = surroundings({"PYTHONHASHSEED": "0", "DUOKA_KEY": "a secret of the tests"})
        # The agents' common store keeps who joins waiting for an address that is only told once.
        self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._env["PATH"] = f"{Path(sys.executable).parent}:{self._env['PATH']}"
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, host: str) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{host}.txt", "wb") as file:
            words = ["unshare", "--uts", "sh", "-c", 'hostname $0; exec "$@"', host, *self._words]
            made = subprocess.Popen(
                words, cwd=self._folder, env=self._env, stdout=file, stderr=file, start_new_session=True
            )
        self.running.append(made)
        return made

    def said(self, host: str) -> str:
        return (self._folder / f"{host}.txt").read_text()

    def until(self, condition: Callable[[], object], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [path.read_text()[-3000:] for path in self._folder.glob("*.txt")]
            time.sleep(0.1)


def numbers(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\d+) (\d\.\d+)$", text, re.M)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path, ["-m", "duoka", "run", "train.py"])
    yield made
    for one in made.running:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


@pytest.mark.parametrize("script", [SCRIPT, API], ids=["plain", "API"])
def test_a_node_joins_and_is_lost(agents: Agents, tmp_path: Path, script: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(script.replace("COUNT", "14").replace("PAUSE", "0"))
    alone = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    subprocess.run(["rm", "-r", tmp_path / "saved"], check=True)
    path.write_text(script.replace("COUNT", "14").replace("PAUSE", "0.4"))
    first = agents.start("host0")
    agents.until(lambda: len(numbers(agents.said("host0"))) >= 1)
    second = agents.start("host1")
    agents.until(lambda: numbers(agents.said("host0").partition("machine 0 of 2")[2]))  # an epoch of both
    os.killpg(second.pid, signal.SIGKILL)
    agents.until(lambda: first.poll() is not None, 200.0)
    found = numbers(agents.said("host0"))
    assert first.returncode == 0, agents.said("host0")
    assert dict(found) == dict(numbers(alone))
    assert len(found) <= 14 + 2  # an epoch may be printed, and not saved
