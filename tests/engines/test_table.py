"""The table of docs/engines: each engine, with each kind of script, and what may happen to it (long)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.cluster import Cluster, cluster, missing
from tests.flows.flow import surroundings
from tests.flows.test_machines import SAME, free_place, machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

HEAD = """\
import os, posix, re, signal, time
import torch

told = open("/proc/self/environ").read().split("\\0")  # of the command; what a worker sees of it differs
is_second = any(re.fullmatch("(RANK|OMPI_COMM_WORLD_RANK|SLURM_PROCID|HERE)=1", one) for one in told)

def happens(step):
    if step != 2 or not is_second or WHAT == "numbers":
        return
    if WHAT == "restart":
        try:
            posix.mkdir("once")
        except FileExistsError:
            return
    os.kill(os.getppid() if WHAT == "command" else os.getpid(), signal.SIGKILL)
    time.sleep(60)

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
x = torch.randn(32, 4)
"""
LOOP = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step, (rows,) in enumerate(loader):
    happens(step)
    loss = net(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DATA = "torch.utils.data.TensorDataset(x)"
SCRIPTS = {
    "plain": f"{HEAD}loader = torch.utils.data.DataLoader({DATA}, batch_size=8){LOOP}    print(step, loss.item())\n",
    "api": f"{HEAD}import duoka\nrun = duoka.start(seed=0)\nnet = run.model(net)\n"
    f"loader = run.loader({DATA}, batch_size=8){LOOP}    run.print(step, loss.item())\n",
    "own": f"{HEAD}import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "rank, size = dist.get_rank(), dist.get_world_size()\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    f"loader = [(rows.chunk(size)[rank],) for rows in x.split(8)]\nloader = [one for one in loader]{LOOP}"
    "    dist.all_reduce(total := loss.detach() / size)\n    if rank == 0: print(step, total.item())\n"
    "dist.destroy_process_group()\n",
}
Start = Callable[[Path, list[str]], tuple[int, str, str]]  # exit code, standard output, standard error
ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONUNBUFFERED": "1"}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def started(folder: Path, commands: list[list[str]], env: dict[str, str]) -> tuple[int, str, str]:
    """The first one's exit code, and what all said."""
    running = [
        subprocess.Popen(
            words,
            cwd=folder,
            env=env | {"HERE": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, words in enumerate(commands)
    ]
    said = [one.communicate(timeout=200) for one in running]
    return running[0].returncode, "".join(out for out, _ in said), "".join(error for _, error in said)


def environment() -> dict[str, str]:
    return surroundings(SAME) | ENV | {"PATH": PATH}


def by(*words: str) -> Start:
    def start(folder: Path, options: list[str]) -> tuple[int, str, str]:
        if shutil.which(words[0], path=PATH) is None:
            pytest.skip(f"{words[0]} is not installed")
        return started(folder, [[*words, "run", *options, "train.py"]], environment())

    return start


def by_hand(folder: Path, options: list[str]) -> tuple[int, str, str]:
    place = free_place()
    words = ["duoka", "run", "--devices", "cpu:1", *options]
    return started(folder, [[*words, *machine(number, 2, place), "train.py"] for number in range(2)], environment())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


STARTERS: dict[str, Start | None] = {
    "duoka": by_hand,
    "torchrun": by("torchrun", "--nproc-per-node", "2", "-m", "duoka"),
    "mpirun": by("mpirun", "--oversubscribe", "-n", "2", "duoka"),
    "slurm": None,
}


@pytest.fixture(params=STARTERS)
def engine(request: pytest.FixtureRequest) -> Start:
    start = STARTERS[request.param]
    if start is not None:
        return start
    made: Cluster = request.getfixturevalue("slurm")

    def start_by_slurm(folder: Path, options: list[str]) -> tuple[int, str, str]:
        words = ["srun", "--nodes", "2", "--ntasks-per-node", "1", "duoka", "run", *options, "train.py"]
        return started(folder, [words], made.env | ENV)

    return start_by_slurm


@pytest.fixture(params=SCRIPTS)
def ended(
    request: pytest.FixtureRequest, engine: Start, tmp_path: Path
) -> Callable[[str, list[str]], tuple[int, str, str]]:
    def ended(what: str, options: list[str]) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(f"WHAT = {what!r}\n{SCRIPTS[request.param]}")
        found = engine(tmp_path, options)
        assert_left_alone(tmp_path)
        return found

    return ended


def assert_left_alone(folder: Path) -> None:
    """No process works in a folder any more, half a minute later."""
    deadline = time.monotonic() + 30
    while left := processes_in(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes_in(folder: Path) -> list[str]:
    """The processes that work in a folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (one / "cwd").readlink() == folder and (one / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append((one / "cmdline").read_text())
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(f"WHAT = 'numbers'\n{SCRIPTS['plain']}")
    words = [sys.executable, "train.py"]
    return losses(subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout)


def losses(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"^[0-3] (\d\.\d+)$", said, re.M)]


Ended = Callable[[str, list[str]], tuple[int, str, str]]


def test_numbers_of_one_process(ended: Ended, alone: list[float]) -> None:
    code, said, errors = ended("numbers", [])
    assert code == 0, errors
    assert losses(said) == pytest.approx(alone, rel=1e-5)


def test_a_rank_is_killed(ended: Ended) -> None:
    code, _, errors = ended("rank", [])
    assert code != 0
    assert errors.count("ended by SIGKILL, sent by somebody or by the kernel when memory ran out") == 1, errors


def test_a_command_is_killed(ended: Ended) -> None:
    code, _, errors = ended("command", [])
    assert code != 0, errors


def test_it_starts_again(ended: Ended, alone: list[float]) -> None:
    code, said, errors = ended("restart", ["--restarts", "1"])
    assert code == 0, errors
    assert losses(said)[-4:] == pytest.approx(alone, rel=1e-5)
