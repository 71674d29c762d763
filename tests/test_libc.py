from __future__ import annotations

from pathlib import Path

from duoka.libc import begin_writeback
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


def test_writeback_is_a_hint_that_changes_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write(b"abc")
        file.flush()
        begin_writeback(file.fileno(), 0, 3)
        begin_writeback(-1, 0, 3)
    assert (tmp_path / "x").read_bytes() == b"abc"
