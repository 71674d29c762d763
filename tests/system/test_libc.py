from __future__ import annotations

import socket
import threading
from pathlib import Path

from duoka.system.libc import begin_writeback, names_from_files, raise_in_thread
from tests.flows.flow import Flow
from tests.flows.group import until


def test_a_process_dies_with_the_one_that_forked_it(flow: Flow) -> None:
    source = """
        import os, signal, time
        from duoka.system.libc import die_with
        parent = os.getpid()
        if os.fork() == 0:
            die_with(parent)
            open("ready", "w").close()
            time.sleep(60)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        """
    running = flow.start([flow.write("script.py", source)], program="python")
    assert running.wait().returncode == 137  # the fixture finds what is left behind


def test_a_process_whose_parent_is_dead_already_dies_too(flow: Flow) -> None:
    source = """
        import os, time
        from duoka.system.libc import die_with
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            die_with(parent)
            open("outlived", "w").close()
            time.sleep(60)
        """
    flow.python([flow.write("script.py", source)]).ok()
    assert not (flow.folder / "outlived").exists()


def test_what_c_printed_is_written(flow: Flow) -> None:
    source = """
        import ctypes, os
        from duoka.system.libc import flush_c_streams
        ctypes.CDLL(None).printf(b"from C")
        flush_c_streams()
        os._exit(0)
        """
    running = flow.start([flow.write("script.py", source)], program="python")
    until(lambda: running.stdout() == "from C")
    running.wait().ok()


def test_memory_that_was_freed_is_used_again(flow: Flow) -> None:
    source = """
        import ctypes, resource, torch
        from duoka.system import environment

        ctypes.CDLL(None).mallopt(-1, 0)  # give back whatever is free
        environment.keep_freed_memory()

        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        def step():
            held = [torch.ones(3 * 2**18) for _ in range(12)]  # as of a forward and a backward pass

        for _ in range(6):
            step()  # the heap grows until all of them have a place
        before = faults()
        for _ in range(4):
            step()
        print(faults() - before)
        """
    script = flow.write("script.py", source)
    kept = int(flow.python([script]).ok().stdout)
    chosen = int(flow.python([script], env={"MALLOC_TRIM_THRESHOLD_": "0"}).ok().stdout)
    assert kept < 1000 < 20_000 < chosen  # of 9216 pages in a step


def test_an_exception_is_raised_in_another_thread() -> None:
    begun, seen = threading.Event(), []

    def busy() -> None:
        try:
            while True:
                begun.set()
        except KeyError as error:
            seen.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    raise_in_thread(thread.ident, KeyError)
    thread.join(30)
    assert len(seen) == 1


def test_torchs_threads_are_ended_before_a_fork_and_start_anew(flow: Flow) -> None:
    source = """
        import os
        import torch
        from duoka.system.libc import end_thread_pools
        torch.set_num_threads(3)
        torch.ones(500, 500) @ torch.ones(500, 500)
        (torch.ones(300_000) + 1).sum()
        before = len(os.listdir("/proc/self/task"))
        ended = end_thread_pools()
        print(ended, len(os.listdir("/proc/self/task")) <= before - 2)
        child = os.fork()
        total = (torch.ones(300_000) + 1).sum().item()
        if child == 0:
            os._exit(total == 600_000)
        print(os.waitpid(child, 0)[1] >> 8, total)
        """
    running = flow.start([flow.write("script.py", source)], program="python")
    assert running.wait().ok().stdout == "True True\n1 600000.0\n"


def test_writeback_is_a_hint_that_changes_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(b"abc")
        file.flush()
        begin_writeback(file.fileno(), 0, 3)
        begin_writeback(-1, 0, 3)
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_names_come_from_files_for_a_while() -> None:
    with names_from_files():
        assert socket.gethostbyname("localhost") == "127.0.0.1"
    assert socket.gethostbyname("localhost") == "127.0.0.1"
