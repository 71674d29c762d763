"""Runs that a real Slurm of two nodes starts (long, for root)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.cluster import Cluster, cluster, missing
from tests.flows.group import GROUP
from tests.flows.test_machines import PLAIN

pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() != "", reason=missing() or "-")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.mark.parametrize("tasks", [["--ntasks-per-node", "1"], ["--ntasks", "3"]], ids=["machines", "ranks"])
def test_srun_starts_one_run(tasks: list[str], slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    alone = slurm.run("python", "train.py", cwd=tmp_path).stdout
    (tmp_path / "losses.txt").unlink()
    found = slurm.run("srun", "--nodes", "2", *tasks, "duoka", "run", "train.py", cwd=tmp_path)
    assert found.stdout == alone
    assert "(set by Slurm)" in found.stderr
    assert "no key" not in found.stderr


def test_what_one_rank_does_ends_all(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{GROUP}if rank == 1: raise ValueError('boom')\nwhile True: barrier()\n")
    words = ("srun", "--nodes", "2", "--ntasks-per-node", "1", "duoka", "run", "script.py")
    said = slurm.run(*words, cwd=tmp_path, code=1).stderr
    assert said.count("duoka: raised on rank 1 of 2 (dkn1)") == 1
    assert said.count("duoka: rank 1 raised ValueError: boom (on machine 1 (dkn1)); the run was ended") == 1


def test_an_allocation_without_srun_leaves_machines_idle(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    said = slurm.run("salloc", "--nodes", "2", "duoka", "run", "train.py", cwd=tmp_path).stderr
    assert "duoka: Slurm has allocated another machine, which is left idle: srun --ntasks-per-node 1" in said


SAVED = """\
import time
import torch
import duoka
run = duoka.start(seed=0)
net = run.model(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
loader = run.loader(torch.utils.data.TensorDataset(rows), batch_size=8, shuffle=True)
saved = run.checkpoint("saved", model=net, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(12):
    for (x,) in loader:
        loss = net(x).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        time.sleep(PAUSE)
    run.print(epoch, f"{loss.item():.6f}", flush=True)
"""


@pytest.mark.timeout(400)
def test_a_job_that_is_preempted_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    """The recipe of docs/engines/slurm.md."""
    page = Path(__file__).parents[2] / "docs/engines/slurm.md"
    recipe = next(block for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S) if "#SBATCH" in block)
    (tmp_path / "job.sh").write_text(recipe)
    (tmp_path / "train.py").write_text(SAVED.replace("PAUSE", "0"))
    alone = slurm.run("python", "train.py", cwd=tmp_path).stdout
    slurm.run("rm", "-r", "saved", cwd=tmp_path)
    (tmp_path / "train.py").write_text(SAVED.replace("PAUSE", "0.3"))
    job = slurm.run("sbatch", "--parsable", "job.sh", cwd=tmp_path).stdout.strip()
    output = tmp_path / f"slurm-{job}.out"

    def printed() -> list[str]:
        text = output.read_text() if output.exists() else ""
        return re.findall(r"^\d+ \d\.\d+$", text, re.M)

    slurm.until(lambda: len(printed()) >= 2)
    slurm.run("scancel", "--signal", "USR1", job, cwd=tmp_path)
    slurm.until(lambda: len(printed()) >= 12, 200.0)
    assert printed() == alone.splitlines()
    shown = slurm.run("scontrol", "show", "job", job, cwd=tmp_path).stdout
    assert "Restarts=1" in shown
