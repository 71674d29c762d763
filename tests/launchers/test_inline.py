from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.flows.flow import Flow

Command = Callable[..., subprocess.CompletedProcess[str]]

BODIES = {
    "end": "print('out', sys.argv, __name__, sys.path[0]); print('err', file=sys.stderr)",
    "exit code": "sys.exit(3)",
    "exit text": "sys.exit('sorry')",
    "error": "def f():\n    raise ValueError('boom')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('boom') from error",
    "interrupt": "raise KeyboardInterrupt",
    "end of input": "input()",
    "input": "print(input())",
    "broken pipe": "raise BrokenPipeError(32, 'Broken pipe')",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "thread": "from threading import Timer\nTimer(0.1, lambda: print('late')).start()",
    "hook": "sys.excepthook = lambda *error: print('hook', error[1]); raise ValueError('boom')",
    "breakpoint": "x = 5\nbreakpoint()\nprint(x)",
    "not python": "x = = 1",
    "handlers": "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))",
    "environment": "import os; print([name for name in os.environ if 'RANK' in name or 'THREADS' in name])",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_one_worker_is_python(flow: Flow, body: str) -> None:
    script = flow.write("script.py", f"import sys\n{body}\n")
    words = "typed\n" if "input" not in body or "print(input" in body else ""
    words = "p x\nc\n" if "breakpoint" in body else words
    expected = flow.python([script, "a", "--b"], stdin=words)
    assert flow.run(["run", "-q", "--devices", "cpu:1", script, "a", "--b"], stdin=words) == expected


def test_one_worker_imports_what_the_script_does(flow: Flow, command: Command) -> None:
    script = flow.write("script.py", "import sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    result = command("run", "-q", "--devices", "cpu:1", script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "False False\n", "")


def test_a_mistake_with_the_api_is_told_with_its_line(flow: Flow) -> None:
    script = flow.write("script.py", "import duoka\nrun = duoka.start()\nrun.loader([1, 2], 0)\n")
    result = flow.run(["run", "-q", "--devices", "cpu:1", script])
    assert result.returncode == 2
    assert 'script.py", line 3, in <module>\n    run.loader([1, 2], 0)\n' in result.stderr
    assert result.stderr.count("OptionError: batch_size must be") == 1


def test_ctrl_c_ends_one_worker_as_it_ends_python(flow: Flow) -> None:
    # The file is written half a second into the sleep, so that Ctrl-C comes at the same line in both.
    tells = "import threading, time\nthreading.Timer(0.5, lambda: open('ready', 'w').close()).start()\n"
    script = flow.write("script.py", tells + "time.sleep(60)\n")
    ends = []
    for program in (["-m", "duoka", "run", "-q", "--devices", "cpu:1", script], [script]):
        process = subprocess.Popen([sys.executable, *program], cwd=flow.folder, stderr=subprocess.PIPE, text=True)
        while not (flow.folder / "ready").exists():
            time.sleep(0.01)
        process.send_signal(2)
        ends.append((process.communicate()[1], process.returncode))
        (flow.folder / "ready").unlink()
    assert ends[0] == ends[1]


def test_cards_are_hidden_from_one_worker_on_the_cpu(flow: Flow) -> None:
    script = flow.write("script.py", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    assert flow.run(["run", "-q", "--devices", "cpu", script]).ok().stdout == "''\n"


def test_threads_that_are_asked_for(flow: Flow) -> None:
    script = flow.write("script.py", "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert flow.run(["run", "-q", "--devices", "cpu", "--threads", "1", script]).ok().stdout == "1\n"


def test_a_script_that_makes_its_own_workers_is_run_once_and_told_no_rank(flow: Flow) -> None:
    source = """
        import os
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def work(rank, port):
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=1)
            dist.barrier()

        if __name__ == "__main__":
            import socket
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(work, args=(port,), nprocs=1)  # a new interpreter, which imports torch
            print("once", [name for name in os.environ if name.endswith("RANK")])
        """
    result = flow.run(["run", "-q", "--devices", "cpu:2", flow.write("script.py", source)]).ok()
    lines = result.stdout.splitlines()  # before it, gloo of torch 2.10 writes of its group
    assert lines[-1] == "once []"
    assert sum("once" in line for line in lines) == 1
