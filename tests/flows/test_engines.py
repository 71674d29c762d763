"""A command for each rank, as engines start them: torchrun's and Open MPI's real ones, where they are installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result, Running, surroundings
from tests.flows.group import group, until
from tests.flows.test_machines import PLAIN, SAME_HASHES, free_place

HOST = socket.gethostname()


def ranks(flow: Flow, script: Path, count: int, options: Sequence[str] = ()) -> list[Running]:
    """A command for each rank, as torchrun would start them, and with a port for a store that is not there yet."""
    address, port = free_place().split(":")
    told = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": address, "MASTER_PORT": port}
    told |= {"GROUP_WORLD_SIZE": 1, "XDG_CONFIG_HOME": flow.folder / "settings"}
    return [
        flow.start(
            ["run", *options, script],
            env={name: str(value) for name, value in {**told, "RANK": rank, "LOCAL_RANK": rank}.items()}
            | SAME_HASHES,
        )
        for rank in range(count)
    ]


def run(flow: Flow, script: Path, count: int = 2, options: Sequence[str] = ()) -> list[Result]:
    return [one.wait() for one in ranks(flow, script, count, options)]


def test_a_plain_script_prints_and_saves_what_one_device_does(flow: Flow) -> None:
    import torch

    script = flow.write("train.py", PLAIN)
    alone = flow.python([script], env=SAME_HASHES).ok().stdout
    expected = torch.load(flow.folder / "net.pt")
    (flow.folder / "losses.txt").unlink()
    first, second = run(flow, script)
    assert (first.ok().stdout, second.ok().stdout, second.stderr) == (alone, "", "")
    assert "duoka: rank 0 of 2, rendezvous at 127.0.0.1:" in first.stderr
    assert "(set by torchrun)\n" in first.stderr
    found = torch.load(flow.folder / "net.pt")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    key = flow.folder / "settings/duoka/key"
    assert (key.stat().st_mode & 0o777, len(key.read_text()), key.parent.stat().st_mode & 0o777) == (0o600, 64, 0o700)


def test_a_script_with_its_own_ranks_is_told_what_torchrun_tells(flow: Flow) -> None:
    names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"
    script = group(flow, f"say(*(os.environ[name] for name in '{names}'.split()))\ndist.destroy_process_group()\n")
    results = run(flow, script)
    assert sorted(one.ok().stdout for one in results) == ["0 0 0 2 2 1\n", "1 1 0 2 2 1\n"]


def test_what_one_rank_does_is_told_once(flow: Flow) -> None:
    script = group(flow, "if rank == 1: raise ValueError('boom')\nwhile True: barrier()\n")
    first, second = run(flow, script, options=["--quiet"])
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stderr.startswith(f"duoka: rank 1 raised ValueError: boom (on {HOST}); the run was ended\n")
    assert "Traceback" not in first.stderr
    assert f"duoka: raised on rank 1 of 2 ({HOST})" in second.stderr


def test_a_rank_whose_command_is_killed_ends_the_others(flow: Flow) -> None:
    running = ranks(flow, group(flow, "say('ready')\nwhile True: barrier()"), 2, ["--quiet"])
    until(lambda: all("ready" in one.stdout() for one in running))
    running[1].send(signal.SIGKILL)
    first, second = [one.wait() for one in running]
    assert (first.returncode, second.returncode) == (1, 137)
    assert first.stderr.startswith(f"duoka: rank 1 ({HOST}) is gone: its command has ended; the run was ended\n")


def test_what_all_ranks_do_is_the_script_s_and_shown_once(flow: Flow) -> None:
    script = flow.write("script.py", "import torch\nraise ValueError('boom')\n")
    alone = flow.python([script])
    first, second = run(flow, script, options=["--quiet"])
    assert [(one.returncode, one.stderr) for one in (first, second)] == [(1, alone.stderr), (1, "")]


def real(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    env = surroundings({"XDG_CONFIG_HOME": str(folder / "settings")} | SAME_HASHES)
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    found = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert found.returncode == code, found
    return found


STARTERS = {
    "torchrun": ["torchrun", "--nproc-per-node", "2", "-m", "duoka", "run"],
    "mpirun": ["mpirun", "--oversubscribe", "-n", "2", "duoka", "run"],
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("starter", STARTERS)
def test_a_real_engine_starts_one_run(starter: str, flow: Flow) -> None:
    if shutil.which(STARTERS[starter][0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip(f"{starter} is not installed")
    flow.write("train.py", PLAIN)
    alone = real(flow.folder, sys.executable, "train.py").stdout
    (flow.folder / "losses.txt").unlink()
    assert real(flow.folder, *STARTERS[starter], "train.py").stdout == alone
    group(flow, "if rank == 1: raise ValueError('boom')\nwhile True: barrier()\n")
    said = real(flow.folder, *STARTERS[starter], "script.py", code=1).stderr
    assert said.count("duoka: raised on rank 1 of 2") == 1


@pytest.mark.long
def test_pods_of_a_job_are_never_copies(flow: Flow) -> None:
    flow.write("train.py", PLAIN)
    env = {"JOB_COMPLETION_INDEX": "1"}
    refused = flow.run(["run", "train.py"], env=env)
    assert refused.returncode == 2
    assert "--machines 4 makes 4 pods one run; --machines 1 makes each pod a run of its own" in refused.stderr
