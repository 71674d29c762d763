from __future__ import annotations

import threading

from duoka.libc import raise_in_thread
from tests.flows.flow import Flow
from tests.flows.group import until


def test_a_process_dies_with_the_one_that_forked_it(flow: Flow) -> None:
    source = """
        import os, signal, time
        from duoka.libc import die_with
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
        from duoka.libc import die_with
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
        from duoka.libc import flush_c_streams
        ctypes.CDLL(None).printf(b"from C")
        flush_c_streams()
        os._exit(0)
        """
    running = flow.start([flow.write("script.py", source)], program="python")
    until(lambda: running.stdout() == "from C")
    running.wait().ok()


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
