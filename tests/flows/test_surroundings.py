"""What is wrong around a run: its words, its script, its data, the machine. Each with two workers and with three."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result
from tests.flows.group import group, run, start, until

LOADS = """
import sys
import torch
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn({samples}, 4), torch.randn({samples}, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, num_workers={loader_workers}):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{{loss.item():.5f}}")
"""


@pytest.fixture(params=[2, 3])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.long)])
def prepared_workers(request: pytest.FixtureRequest) -> int:
    """For runs by a new interpreter, which takes seconds to import torch."""
    return int(request.param)


def prepared(how: str, workers: int, script: Path, shell: tuple[str, ...] = ("sh",)) -> Result:
    """A run by a new interpreter, in surroundings that a shell prepares."""
    command = [sys.executable, "-m", "duoka", "run", "-q", "--devices", f"cpu:{workers}", str(script)]
    words = [*shell, "-c", f'{how}; exec "$@"', "sh", *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--devices", "cpu:{}", "nothing.py"], 2, "there is no script 'nothing.py'"),
        (["--devices", "cpu:{}", "folder"], 2, "'folder' is a directory"),
        (["--devices", "cpu:{}", "-m", "nothing"], 2, "there is no module 'nothing'"),
        (["--devices", "7,1{}", "script.py"], 2, "error: --devices 7,1{}: "),
        (["--devices", "cpu:{}", "--log-dir", "script.py/logs", "script.py"], 2, "--log-dir must be"),
        (["--devices", "cpu:{}", "wrong.py"], 1, "SyntaxError: invalid syntax"),
    ],
)
def test_what_cannot_be_run_is_told_once(flow: Flow, workers: int, words: list[str], code: int, told: str) -> None:
    flow.write("script.py", "print('started')")
    flow.write("wrong.py", "x = = 1")
    (flow.folder / "folder").mkdir()
    result = flow.run(["run", "-q", *(word.format(workers) for word in words)])
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.count(told.format(workers)) == 1, result


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_fewer_samples_than_workers_are_no_fault(flow: Flow, workers: int, samples: int) -> None:
    script = flow.write("script.py", LOADS.format(samples=samples, loader_workers=0))
    assert run(flow, script, workers=workers).ok().stdout == flow.python([script]).ok().stdout


def test_a_reader_that_has_enough(flow: Flow, prepared_workers: int) -> None:
    script = flow.write("script.py", "for i in range(100_000): print('a line of output that fills the pipe', i)")
    command = [sys.executable, "-m", "duoka", "run", "-q", "--devices", f"cpu:{prepared_workers}", str(script)]
    piped = ["bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "bash", *command]
    done = subprocess.run(piped, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (1, "a line of output that fills the pipe 0\n")
    assert done.stderr.count("BrokenPipeError") == 1
    assert "rank" not in done.stderr


def test_a_full_disk_under_the_logs_does_not_hide_the_error(flow: Flow, workers: int) -> None:
    """/dev/full: what can be opened, and not written."""
    script = group(flow, "if rank == 1:\n    print('x' * 100000)\nwhile True: meet()")
    logs = flow.folder / "logs"
    logs.mkdir()
    (logs / "rank1.log").symlink_to("/dev/full")
    result = run(flow, script, workers=workers, options=("--log-dir", "logs"))
    assert result.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in result.stderr
    assert "a disk is full" in result.stderr


def test_too_few_open_files_are_told_before_anything_starts(flow: Flow, prepared_workers: int) -> None:
    result = prepared("ulimit -n 24", prepared_workers, flow.write("script.py", "print('never')"))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{prepared_workers} workers need {16 + 8 * prepared_workers} more open files" in result.stderr
    assert "ulimit -n 1024" in result.stderr


def test_no_shared_memory(flow: Flow, prepared_workers: int) -> None:
    """Nothing of duoka's own needs it; a loader's workers do, and the error says what helps."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    unshared, without = ("unshare", "-m", "sh"), "mount -t tmpfs -o ro none /dev/shm"
    result = prepared(
        without, prepared_workers, flow.write("plain.py", LOADS.format(samples=8, loader_workers=0)), unshared
    )
    assert result.returncode == 0, result
    result = prepared(
        without, prepared_workers, flow.write("loads.py", LOADS.format(samples=8, loader_workers=1)), unshared
    )
    assert result.returncode == 1
    assert result.stderr.count("OSError: [Errno 30] Read-only file system") == 1
    assert "/dev/shm: num_workers=0 does without it" in result.stderr


def test_a_port_that_is_taken_is_not_used(flow: Flow, workers: int) -> None:
    """Whatever the surroundings say, the ranks meet at a port of their own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = group(flow, "say(os.environ['MASTER_PORT'])")
        surroundings = {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        result = flow.run(["run", "-q", "--devices", f"cpu:{workers}", script], env=surroundings).ok()
        assert len(set(result.stdout.splitlines()) - {port}) == 1


def test_a_port_that_the_script_insists_on_and_is_taken_is_told(flow: Flow, workers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = flow.write(
            "script.py",
            f"""
            import os
            import torch.distributed as dist
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", {port}, size, rank == 0))
            """,
        )
        result = run(flow, script, workers=workers)
    assert result.returncode == 1
    assert re.search(rf"{port}.*EADDRINUSE|EADDRINUSE.*{port}|address already in use", result.stderr), result
    assert f"raised on rank 0 of {workers}" in result.stderr


def test_two_runs_at_the_same_time(flow: Flow, workers: int) -> None:
    script = group(flow, "time.sleep(0.5); meet(); say(os.environ['MASTER_PORT'])")
    first, second = (start(flow, script, workers=workers) for _ in range(2))
    ports = {line for running in (first, second) for line in running.wait().ok().stdout.splitlines()}
    assert len(ports) == 2


def test_what_is_left_of_a_run_does_not_disturb_the_next(flow: Flow, workers: int) -> None:
    script = group(flow, "open(f'ready{rank}', 'w').close()\nif len(sys.argv) > 1: time.sleep(60)\nmeet()")
    killed = start(flow, script, "wait", workers=workers)
    until(lambda: all((flow.folder / f"ready{rank}").exists() for rank in range(workers)))
    killed.send(signal.SIGKILL)
    run(flow, script, workers=workers).ok()
    assert killed.wait().returncode == 137
