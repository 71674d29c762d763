from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python

LIBRARY = """
    import os, tempfile
    from filelock import FileLock

    def kept(folder):
        '''As `datasets` does: made by the first process, under a lock, and found by the others.'''
        os.makedirs(folder, exist_ok=True)
        with FileLock(os.path.join(folder, "x.lock")):
            path = os.path.join(folder, "x")
            if not os.path.exists(path):
                with open(path + ".part", "w") as file:
                    file.write("made")
                with open(path + ".part") as file:
                    assert file.read() == "made"
                os.rename(path + ".part", path)
            with open(path) as file:
                return file.read()

    def moved(folder):
        '''Made by each process in a temporary file of its own, and moved to where all look for it.'''
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as made:
            pass
        with open(made.name, "w") as file:
            file.write("written")
        os.replace(made.name, os.path.join(folder, "y"))
        with open(os.path.join(folder, "y")) as file:
            return file.read()
    """


def test_a_library_that_locks_keeps_ranks_apart_by_itself(flow: Flow) -> None:
    flow.write("site-packages/keeper.py", LIBRARY)
    source = """
        import os, shutil, sys
        shutil.rmtree("cached", ignore_errors=True)
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
        import keeper

        print(keeper.kept("cached"), keeper.moved("cached"), os.path.exists("cached/x.lock"))
        """
    as_python(flow, source, workers=3)


def test_a_script_s_lock_is_taken_once(flow: Flow) -> None:
    source = """
        import os
        from filelock import FileLock, Timeout

        if os.path.exists("data"):
            os.remove("data")
        lock = FileLock("data.lock")
        with lock:
            if not os.path.exists("data"):
                with open("data", "w") as file:
                    file.write("made")
            print(open("data").read())
        with lock.acquire(timeout=1):
            print(open("data").read())
        """
    as_python(flow, source, workers=3)


def test_a_lock_that_the_garbage_collector_frees_waits_for_nobody(flow: Flow) -> None:
    source = """
        from filelock import FileLock
        from torch import manual_seed, rand

        manual_seed(0)

        class Holder:
            pass

        for _ in range(3000):  # ranks collect them at other times
            holder = Holder()
            holder.holder, holder.lock = holder, FileLock("data.lock")
            rand(1)
        with holder.lock, holder.lock:
            print("held", rand(2).sum().item())
        """
    as_python(flow, source)
