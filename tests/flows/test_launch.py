"""Several workers: how they come to life, what a script finds there, and how it ends well."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import psutil
import pytest

from tests.flows.flow import Flow, without_noise
from tests.flows.group import GROUP, group, run, start, until


def test_ranks_connect(flow: Flow) -> None:
    result = run(flow, group(flow, "say(f'rank {rank} of {size}')"), workers=3).ok()
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
    assert result.stderr == ""


def test_a_distributed_script_is_told_what_torchrun_tells(flow: Flow) -> None:
    names = (
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE "
        "ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    )
    script = group(
        flow,
        f"""
        say(*(os.environ[name] for name in "{names}".split()))
        assert int(os.environ["MASTER_PORT"]) > 0 and os.environ["TORCHELASTIC_RUN_ID"]
        assert dist.is_torchelastic_launched()
        """,
    )
    lines = sorted(run(flow, script).ok().stdout.splitlines())
    assert lines == [f"{rank} {rank} 0 {rank} default 2 2 1 2 127.0.0.1 0 0" for rank in range(2)]


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_local_rank_is_given_in_the_spelling_that_is_parsed(flow: Flow, flag: str) -> None:
    script = flow.write(
        "script.py",
        f"""
        import argparse, os
        import torch.distributed as dist
        parser = argparse.ArgumentParser()
        parser.add_argument("{flag}", type=int)
        parser.add_argument("--epochs", type=int)
        args = parser.parse_args()
        dist.init_process_group("gloo")
        dist.barrier()
        os.write(1, f"{{args.local_rank}} {{args.epochs}}\\n".encode())
        """,
    )
    assert sorted(run(flow, script, "--epochs", "5").ok().stdout.splitlines()) == ["0 5", "1 5"]


def test_one_worker_of_a_distributed_script_has_a_group_of_its_own(flow: Flow) -> None:
    script = group(flow, "say(size, os.environ['LOCAL_RANK']); dist.destroy_process_group()")
    assert run(flow, script, workers=1).ok().stdout == "1 0\n"


def test_a_group_can_be_left_and_made_again(flow: Flow) -> None:
    script = group(
        flow,
        """
        for again in range(3):
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            barrier()
            half = dist.new_group([0, 1])
            if rank < 2:
                dist.barrier(half)
        say("met")
        """,
    )
    assert run(flow, script, workers=3).ok().stdout == "met\n" * 3


END_WITH_DDP_ALIVE = """
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(5):
        model(torch.ones(4, 64)).sum().backward()
    if not DESTROYS:
        return
    dist.destroy_process_group()

main()
"""


@pytest.mark.long
@pytest.mark.parametrize("destroys", [True, False])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_group_whose_ddp_is_alive_does_not_stand_still_at_its_end(flow: Flow, workers: int, destroys: bool) -> None:
    """torch waits there for a thread of gloo's, which may wait for Python's lock: under python, too."""
    script = flow.write("script.py", END_WITH_DDP_ALIVE.replace("DESTROYS", str(destroys)))
    for _ in range(20):
        run(flow, script, workers=workers).ok()


def test_a_module_is_run_as_main(flow: Flow) -> None:
    flow.write("package/__init__.py", "")
    flow.write("package/names.py", "NAME = 'package.train'")
    flow.write(
        "package/train.py",
        GROUP + "from .names import NAME\nsay(__name__, __spec__.name == NAME, sys.argv[1:], sys.path[0])",
    )
    result = flow.run(["run", "-q", "--devices", "cpu:2", "-m", "package.train", "--epochs", "5"]).ok()
    assert result.stdout == f"__main__ True ['--epochs', '5'] {flow.folder}\n" * 2


def test_main_is_the_script_for_pickle_and_new_processes(flow: Flow) -> None:
    script = flow.write(
        "script.py",
        """
        import multiprocessing as mp, os, pickle, sys

        class Net: ...

        def work(queue): queue.put("from a new process")

        if __name__ == "__main__":
            import torch.distributed  # not in new processes, in which it takes seconds
            assert os.environ["RANK"] in "01"
            assert sys.modules["__main__"].Net is Net
            assert isinstance(pickle.loads(pickle.dumps(Net())), Net)
            for method in ("fork", "spawn"):
                context = mp.get_context(method)
                queue = context.Queue()
                child = context.Process(target=work, args=(queue,))
                child.start()
                os.write(1, f"{queue.get()}\\n".encode())
                child.join()
        """,
    )
    assert run(flow, script).ok().stdout == "from a new process\n" * 4


def test_loader_workers_live_and_end(flow: Flow) -> None:
    body = """
data = torch.utils.data.TensorDataset(torch.arange(8))
loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
say(sum(x.sum().item() for x, in loader))
"""
    script = flow.write("script.py", f"if __name__ == '__main__':\n{textwrap.indent(GROUP + body, ' ' * 4)}")
    assert run(flow, script).ok().stdout == "28\n" * 2


def test_ranks_of_a_distributed_script_draw_different_numbers(flow: Flow) -> None:
    script = group(flow, "import random, numpy; say(torch.rand(1).item(), random.random(), numpy.random.rand())")
    first, second = (line.split() for line in run(flow, script).ok().stdout.splitlines())
    assert not set(first) & set(second)


def test_threads_are_as_planned(flow: Flow) -> None:
    script = group(flow, "say(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])")
    assert run(flow, script, options=("--threads", "3")).ok().stdout == "3 3\n" * 2


def test_cards_are_hidden_from_workers_on_the_cpu(flow: Flow) -> None:
    script = group(flow, "say(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    assert run(flow, script).ok().stdout == "''\n" * 2


def test_workers_find_the_signal_handlers_of_a_new_interpreter(flow: Flow) -> None:
    script = flow.write(
        "script.py",
        """
        import os, signal
        names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2"]
        handlers = [signal.getsignal(getattr(signal, name)) for name in names]
        said = (handlers, signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, []))
        os.write(1, f"{said}\\n".encode())
        """,
    )
    expected = flow.python([script]).ok()
    assert run(flow, script, options=("--kind", "distributed")).ok().stdout == expected.stdout * 2


def test_only_rank_0_has_standard_input(flow: Flow) -> None:
    script = group(flow, "say(rank, repr(sys.stdin.read()))")
    result = flow.run(["run", "-q", "--devices", "cpu:2", script], stdin="typed").ok()
    assert sorted(result.stdout.splitlines()) == ["0 'typed'", "1 ''"]


def test_no_descriptor_of_another_worker_is_left_open(flow: Flow) -> None:
    script = flow.write(
        "script.py",
        """
        import os, sys
        import torch.distributed
        names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        sockets = [name for name in names if os.path.exists(name) and "socket" in os.readlink(name)]
        os.write(1, f"{len(sockets)}\\n".encode())
        """,
    )
    result = run(flow, script, workers=4, options=("--kind", "distributed")).ok()
    assert len(set(result.stdout.splitlines())) == 1, "later workers have more than the first"


def test_two_runs_at_the_same_time(flow: Flow) -> None:
    script = group(flow, "time.sleep(0.5); barrier(); say(os.environ['MASTER_PORT'])")
    first, second = start(flow, script), start(flow, script)
    ports = {line for running in (first, second) for line in running.wait().ok().stdout.splitlines()}
    assert len(ports) == 2


def test_the_store_is_reached_from_this_machine_only(flow: Flow) -> None:
    script = group(
        flow,
        """
        if rank == 0:
            say(os.environ["MASTER_PORT"])
        time.sleep(50)
        """,
    )
    running = start(flow, script)
    until(lambda: running.stdout().endswith("\n"))
    port = int(running.stdout())
    listening = [
        one.laddr
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    running.send(signal.SIGKILL)
    running.wait()
    until(lambda: not any(one.laddr.port == port for one in psutil.net_connections("tcp") if one.status == "LISTEN"))


def test_threads_and_exit_functions_are_waited_for_as_in_python(flow: Flow) -> None:
    body = """
        import atexit, ctypes, threading, time
        atexit.register(lambda: print("atexit"))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        threading.Thread(target=lambda: (time.sleep(50), print("daemon")), daemon=True).start()
        ctypes.CDLL(None).printf(b"from C\\n")
        print("main")
        """
    expected = flow.python([flow.write("plain.py", body)]).ok()
    script = flow.write("script.py", body)
    result = run(flow, script, options=("--kind", "distributed", "--log-dir", "logs")).ok()
    assert result.stdout == expected.stdout
    assert sorted(expected.stdout.split()) == ["C", "atexit", "from", "main", "thread"]
    assert (flow.folder / "logs/rank1.log").read_text().splitlines() == ["from C", "main", "thread", "atexit"]


@pytest.mark.parametrize("value", ["None", "3", "'sorry'", "256 + 7"])
def test_sys_exit_is_as_in_python(flow: Flow, value: str) -> None:
    expected = flow.python([flow.write("plain.py", f"import sys; sys.exit({value})")])
    result = run(flow, group(flow, f"sys.exit({value})"))
    assert (result.returncode, result.stdout, result.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_an_exit_code_of_an_exit_function_that_ends_the_process_counts(flow: Flow) -> None:
    result = run(flow, group(flow, "import atexit; atexit.register(os._exit, 7)"))
    assert result.returncode == 7


def test_log_files_are_kept_where_asked_for(flow: Flow) -> None:
    script = group(flow, "print('out', rank); print('err', rank, file=sys.stderr)")
    result = run(flow, script, workers=3, options=("--log-dir", "new/logs")).ok()
    assert (result.stdout, result.stderr) == ("out 0\n", "err 0\n")
    logs = {path.name: without_noise(path.read_text()) for path in (flow.folder / "new/logs").iterdir()}
    assert logs == {f"rank{rank}.log": f"out {rank}\nerr {rank}\n" for rank in (1, 2)}


def test_a_log_dir_that_cannot_be_made_is_said_before_anything_is_started(flow: Flow) -> None:
    flow.write("file", "")
    result = run(flow, group(flow, "say('started')"), options=("--log-dir", "file/logs"))
    assert result.returncode == 2
    assert "--log-dir" in result.stderr
    assert result.stdout == ""


def test_a_program_that_the_script_leaves_running_is_left_alone_as_by_python(flow: Flow) -> None:
    script = group(flow, "import subprocess; subprocess.Popen(['sleep', '78']) if rank == 0 else None")
    running = start(flow, script)
    with pytest.raises(AssertionError, match=r"left behind.*sleep 78"):
        running.wait()


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_a_reader_that_has_enough_ends_the_run_as_it_ends_python(flow: Flow, kind: str) -> None:
    body = "for i in range(100_000): print('a line of output that fills the pipe', i)\n"
    script = group(flow, body) if kind == "distributed" else flow.write("script.py", body)
    ends = []
    for program, words in (
        ("duoka", ["run", "-q", "--devices", "cpu:2", script]),
        ("python", [flow.write("p.py", body)]),
    ):
        reading, writing = os.pipe()
        with open(writing, "wb") as pipe:
            running = flow.start(words, program=program, stdout=pipe)
        with open(reading) as lines:
            assert any(line.startswith("a line of output") for line in lines)  # gloo of torch 2.10 writes first
        result = running.wait()
        ends.append((result.returncode, re.sub(r"line \d+", "", result.stderr.replace("script.py", "p.py"))))
    assert ends[0] == ends[1]
    assert "BrokenPipeError" in ends[0][1]
