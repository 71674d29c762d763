"""Runs on a real Ray of two nodes, both on this machine (long; pip install 'ray[train]')."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks
from tests.engines.test_table import assert_left_alone
from tests.flows.flow import surroundings
from tests.flows.test_machines import PLAIN, free_place

RAY = str(Path(sys.executable).with_name("ray"))
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which(RAY) is None, reason="needs ray"),
]

HEAD = """\
import os, signal, sys, time
from pathlib import Path
import ray
import duoka
import duoka.ray
ray.init(address=ADDRESS)

def losses(pause=0.0, before=lambda rank, epoch: None):
    import torch
    run = duoka.start(seed=0)
    net = run.model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(22, 4))
    loader = run.loader(data, batch_size=6, shuffle=True)
    saved = run.checkpoint("saved", model=net, optimizer=optimizer, loader=loader)
    found = []
    for epoch in saved.epochs(4):
        before(run.rank, epoch)
        for (x,) in loader:
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
        found.append(round(loss.item(), 5))
    return run.rank, run.world_size, found

"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = free_place()
    port = place.partition(":")[2]
    small = ["--num-cpus", "2", "--object-store-memory", "100000000", "--disable-usage-stats"]
    small += ["--node-ip-address", "127.0.0.1"]
    folder = tmp_path_factory.mktemp("ray")
    running = []
    try:
        for name, words in (
            ("head", ["--head", "--port", port, "--include-dashboard", "false"]),
            ("other", ["--address", place]),
        ):
            with open(folder / name, "wb") as file:
                command = [RAY, "start", *words, *small, "--block"]
                running.append(
                    subprocess.Popen(
                        command, env=surroundings({"PYTHONUNBUFFERED": "1"}), cwd=folder, stdout=file, stderr=file
                    )
                )
            deadline = time.monotonic() + 180
            while b"Ray runtime started" not in (folder / name).read_bytes():
                assert time.monotonic() < deadline, (folder / name).read_text()
                assert running[-1].poll() is None, (folder / name).read_text()
                time.sleep(0.2)
        yield place
    finally:
        for one in reversed(running):  # not `ray stop`, which ends every Ray of this machine
            one.terminate()
        for one in running:
            one.wait()


Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def driver(address: str, tmp_path: Path) -> Run:
    """Runs a program that uses the cluster, in a folder of its own, to its end; nothing may remain in that folder."""

    def run(source: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "driver.py").write_text(source.replace("ADDRESS", repr(address)))
        words = [sys.executable, "driver.py"]
        found = subprocess.run(words, cwd=tmp_path, env=surroundings({}), capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found
        assert_left_alone(tmp_path)
        return found

    return run


def shown(found: subprocess.CompletedProcess[str], name: str) -> object:
    return eval(re.findall(rf"^{name} (.*)$", found.stdout, re.M)[0])


def test_a_function_computes_what_one_process_does(driver: Run) -> None:
    found = driver(
        HEAD + 'print("several", duoka.ray.launch(losses, devices="cpu:1", nodes=2))\n'
        'import shutil; shutil.rmtree("saved")\n'
        'print("one", duoka.ray.launch(losses, devices="cpu"))\n'
    )
    (first, second), (one,) = shown(found, "several"), shown(found, "one")  # type: ignore[misc]
    assert (first[:2], second[:2], one[:2]) == ((0, 2), (1, 2), (0, 1))
    assert len(one[2]) == 4
    assert first[2] == pytest.approx(one[2], abs=2e-5)
    assert second[2] == pytest.approx(one[2], abs=2e-5)


def test_an_error_of_the_function_is_raised_with_its_traceback(driver: Run) -> None:
    found = driver(
        HEAD + "def fails(rank, epoch):\n    if rank == 1 and epoch == 1: raise ValueError('boom')\n"
        "try:\n    duoka.ray.launch(losses, 0, fails, devices='cpu', nodes=2)\n"
        "except duoka.WorkerFailed as error:\n    print('failed', repr(str(error)))\n"
    )
    said = str(shown(found, "failed"))
    assert re.match(r"duoka run on node 1 \(.*\) ended with exit code 1:\n\nTraceback", said)
    assert said.endswith("ValueError: boom\n")


def test_ray_starts_again_what_failed_and_it_goes_on_from_its_checkpoint(driver: Run) -> None:
    """A task of Ray's that is killed takes its command with it; so do the tasks of the other nodes."""
    found = driver(
        HEAD + 'print("whole", duoka.ray.launch(losses, devices="cpu", nodes=2))\n'
        'import shutil; shutil.rmtree("saved")\n'
        "def killed(rank, epoch):\n"
        "    with open(f'epochs.{rank}', 'a') as file: print(epoch, file=file)\n"
        "    if rank == 1 and epoch == 2 and not Path('once').exists():\n"
        "        Path('once').touch()\n"
        "        task = int(Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "        os.kill(task, signal.SIGKILL)\n"
        "        time.sleep(60)\n"
        'print("again", duoka.ray.launch(losses, 0, killed, devices="cpu", nodes=2, retries=1))\n'
        'print("epochs", Path("epochs.1").read_text().split())\n'
    )
    whole, again = shown(found, "whole"), shown(found, "again")
    assert [rank[2][2:] for rank in whole] == [rank[2] for rank in again]  # type: ignore[attr-defined]
    assert shown(found, "epochs") == ["0", "1", "2", "2", "3"]


def test_a_plain_script_prints_what_one_process_does(driver: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    words = [sys.executable, "train.py"]
    env = surroundings({"PYTHONHASHSEED": "0"})
    alone = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    (tmp_path / "losses.txt").unlink()
    found = driver(HEAD + 'print("results", duoka.ray.launch("train.py", devices="cpu", nodes=2)); time.sleep(1)\n')
    assert shown(found, "results") == []
    said = re.findall(r"\(run_command[^)]*\)(?:\x1b\[0m)? (.*)", found.stdout)
    seen = dict.fromkeys(line for line in said if line in alone.splitlines())  # both nodes' Rays read the same log
    assert list(seen) == alone.splitlines()
    assert (tmp_path / "losses.txt").read_text() == f"{alone.splitlines()[-2]}\n"


def test_nodes_that_are_not_there_are_named(driver: Run) -> None:
    found = driver(
        HEAD + "try:\n    duoka.ray.launch(losses, devices='cpu:2', nodes=3, wait=2)\n"
        "except duoka.TimedOut as error:\n    print('failed', repr(str(error)))\n"
    )
    expected = "Ray has not found 3 different nodes with 2 CPUs each in 2 s; the cluster has 2 with altogether 4 CPUs"
    assert str(shown(found, "failed")).startswith(expected)


def test_ray_trains_workers_are_ranks(driver: Run) -> None:
    pytest.importorskip("pyarrow", reason="needs ray[train]")
    found = driver(
        HEAD + 'print("one", duoka.ray.launch(losses, devices="cpu"))\n'
        "import shutil; shutil.rmtree('saved')\n"
        "home = os.getcwd()\n"
        "def loop():\n"
        "    os.chdir(home)\n"
        "    result = losses()\n"
        "    Path(f'ranks.{result[0]}').write_text(repr(result))\n"
        "from ray.train import RunConfig, ScalingConfig\n"
        "from ray.train.torch import TorchTrainer\n"
        "scaling = ScalingConfig(num_workers=2, placement_strategy='STRICT_SPREAD')\n"
        "TorchTrainer(loop, scaling_config=scaling, run_config=RunConfig(storage_path=home + '/ray')).fit()\n"
        "print('ranks', [eval(Path(f'ranks.{rank}').read_text()) for rank in range(2)])\n"
    )
    ((_, _, one),) = shown(found, "one")  # type: ignore[misc]
    for number, (rank, size, those) in enumerate(shown(found, "ranks")):  # type: ignore[arg-type, var-annotated]
        assert (rank, size) == (number, 2)
        assert those == pytest.approx(one, abs=2e-5)


def test_what_the_page_shows_runs(driver: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    code = "\n".join(block.body for block in blocks(DOCS / "engines/ray.md") if block.kind == "py")
    found = driver(code.replace('"auto"', "ADDRESS").replace("/shared", str(tmp_path)))
    assert re.search(r"^\[\(0, 0\.\d+\), \(1, 0\.\d+\)\]$", found.stdout, re.M)
    assert "the last loss 0." in found.stdout + found.stderr


def test_ctrl_c_lets_scripts_save(driver: Run, tmp_path: Path) -> None:
    driver(
        HEAD + "program = os.getpid()\n"
        "def waits(rank, epoch):\n"
        "    def told(number, frame):\n        Path(f'told.{rank}').touch()\n        sys.exit(1)\n"
        "    signal.signal(signal.SIGTERM, told)\n"
        "    Path(f'ready.{rank}').touch()\n"
        "    while not (Path('ready.0').exists() and Path('ready.1').exists()): time.sleep(0.1)\n"
        "    if rank == 0: os.kill(program, signal.SIGINT)\n"
        "    time.sleep(100)\n"
        "try:\n    duoka.ray.launch(losses, 0, waits, devices='cpu', nodes=2)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    assert {path.name for path in tmp_path.glob("told.*")} == {"told.0", "told.1"}
