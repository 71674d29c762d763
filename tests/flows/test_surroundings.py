"""What is wrong around a run: its words, its script, its data, the machine. Each with two workers and with three."""

from __future__ import annotations

import re
import signal
import socket
import subprocess

import pytest

from tests.flows.flow import Flow
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


def test_a_full_disk_under_the_logs_does_not_hide_the_error(flow: Flow, workers: int) -> None:
    """/dev/full: what can be opened, and not written."""
    script = group(flow, "if rank == 1:\n    print('x' * 100000)\nwhile True: barrier()")
    logs = flow.folder / "logs"
    logs.mkdir()
    (logs / "rank1.log").symlink_to("/dev/full")
    result = run(flow, script, workers=workers, options=("--log-dir", "logs"))
    assert result.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in result.stderr
    assert "a disk is full" in result.stderr


def test_too_few_open_files_are_told_before_anything_starts(flow: Flow, workers: int) -> None:
    """Those that are open are as many as in a new interpreter, and two of the warm process's."""
    words = ["run", "-q", "--devices", f"cpu:{workers}", flow.write("script.py", "print('never')")]
    result = flow.run(words, prepare="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (26, 26))")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{workers} workers need {16 + 8 * workers} more open files" in result.stderr
    assert "ulimit -n 1024" in result.stderr


WITHOUT = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_RDONLY, MS_REC, MS_PRIVATE = 0x20000, 1, 0x4000, 1 << 18
for code in (
    c.unshare(CLONE_NEWNS),
    c.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
    c.mount(b"none", b"/dev/shm", b"tmpfs", MS_RDONLY, None),
):
    assert code == 0, os.strerror(ctypes.get_errno())
"""


def test_no_shared_memory(flow: Flow) -> None:
    """Nothing of duoka's own needs it; a loader's workers do, and the error says what helps."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    plain, loads = (flow.write(f"{n}.py", LOADS.format(samples=8, loader_workers=n)) for n in (0, 1))
    flow.run(["run", "-q", "--devices", "cpu:2", plain], prepare=WITHOUT).ok()
    result = flow.run(["run", "-q", "--devices", "cpu:2", loads], prepare=WITHOUT)
    assert result.returncode == 1
    assert result.stderr.count("OSError: [Errno 30] Read-only file system") == 1
    assert "/dev/shm: num_workers=0 does without it" in result.stderr


def test_a_port_that_is_taken_is_not_used(flow: Flow, workers: int) -> None:
    """Whatever the surroundings say, the ranks connect at a port of their own."""
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
    script = group(flow, "time.sleep(0.5); barrier(); say(os.environ['MASTER_PORT'])")
    first, second = (start(flow, script, workers=workers) for _ in range(2))
    ports = {line for running in (first, second) for line in running.wait().ok().stdout.splitlines()}
    assert len(ports) == 2


def test_what_is_left_of_a_run_does_not_disturb_the_next(flow: Flow, workers: int) -> None:
    script = group(flow, "open(f'ready{rank}', 'w').close()\nif len(sys.argv) > 1: time.sleep(60)\nbarrier()")
    killed = start(flow, script, "wait", workers=workers)
    until(lambda: all((flow.folder / f"ready{rank}").exists() for rank in range(workers)))
    killed.send(signal.SIGKILL)
    run(flow, script, workers=workers).ok()
    assert killed.wait().returncode == 137
