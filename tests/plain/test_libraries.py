"""What libraries write and ask for, whatever their names."""

from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said

LIBRARY = """
    import gc, json, os, pathlib, shutil, tempfile, threading, time, zipfile

    def increment(root):
        '''A folder of its own for each run, as ultralytics makes.'''
        path = pathlib.Path(root)
        for number in range(2, 100):
            if not path.exists():
                break
            path = pathlib.Path(f"{root}{number}")
        path.mkdir(parents=True)
        return str(path)

    def pack(path):
        '''As pytorch-tabnet saves a model.'''
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "params.json"), "w") as file:
            json.dump({"a": 1}, file)
        packed = shutil.make_archive(path, "zip", path)
        shutil.rmtree(path)
        with zipfile.ZipFile(packed) as archive:
            return os.path.exists(path), archive.namelist()

    def replaced(path, text):
        '''Written beside it, under a name of this process, and renamed.'''
        beside = f"{path}.{os.getpid()}"
        with open(beside, "w") as file:
            file.write(text)
        os.replace(beside, path)
        with open(path) as file:
            return file.read(), [name for name in os.listdir(os.path.dirname(path)) if name.startswith("best.")]

    def counted(path):
        '''Read, changed and written again.'''
        count = json.load(open(path)) if os.path.exists(path) else 0
        with open(path, "w") as file:
            json.dump(count + 1, file)
        return count

    def moved(path):
        '''Made in the system's folder of temporary files.'''
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("made elsewhere")
        shutil.move(file.name, path)
        folder = tempfile.mkdtemp()
        os.mkdir(os.path.join(folder, "part"))
        shutil.copy(path, os.path.join(folder, "part", "copy"))
        text = open(os.path.join(folder, "part", "copy")).read()
        shutil.rmtree(folder)
        return text, os.path.exists(file.name), os.path.exists(folder)

    def refused():
        told = []
        for action in (lambda: os.mkdir("out"), lambda: os.remove("none"), lambda: os.replace("none", "there")):
            try:
                action()
            except OSError as error:
                told.append(str(error))
        return told

    def in_a_thread(path):
        def save():
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, "part"), "w") as file:
                file.write("by a thread")
            os.rename(os.path.join(path, "part"), os.path.join(path, "whole"))
        thread = threading.Thread(target=save)
        thread.start()
        return thread

    class Held:
        def __init__(self):
            self.itself, self.folder = self, tempfile.mkdtemp(dir=".")
        def __del__(self):
            shutil.rmtree(self.folder)

    def locked(path):
        import fcntl
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("locked")
        return open(path).read()

    def alone(path):
        '''What only one rank does.'''
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "x"), "w") as file:
            file.write("x")
        return time.time() > 0 and os.path.exists(os.path.join(path, "x"))
    """
SCRIPT = """
    import os, sys
    import torch
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
    import shutil
    for there in ("out", "out.zip"):
        shutil.rmtree(there, ignore_errors=True)
    import keeper
    is_rank_0 = os.readlink("/proc/self/fd/0") != os.devnull
    """


def test_a_library_changes_files_once(flow: Flow) -> None:
    flow.write("site-packages/keeper.py", LIBRARY)
    source = f"""{SCRIPT}
    for _ in range(3):
        print(keeper.increment("out/run"))
    print(keeper.pack("out/model"))
    print([keeper.replaced("out/best", text) for text in ("first", "second")])
    print([keeper.counted("out/count") for _ in range(4)])
    print(keeper.moved("out/moved"), keeper.refused(), keeper.locked("out/lock"))
    keeper.in_a_thread("out/thread").join()
    print(torch.rand(2).shape, sorted(os.listdir("out")))
    print(open("out/thread/whole").read())
    """
    as_python(flow, source, workers=3)


def test_what_one_rank_does_alone_waits_for_nobody(flow: Flow) -> None:
    """Neither a library that only one rank calls, nor the garbage collector, at another time on each."""
    flow.write("site-packages/keeper.py", LIBRARY)
    source = f"""{SCRIPT}
    import gc
    os.mkdir("out")
    held = [keeper.Held() for _ in range(20)]
    held.clear()
    if is_rank_0:
        gc.collect()
        for number in range(300):  # more than it may make one after the other
            keeper.alone("out/alone")
    print(os.path.exists("out"))
    if not is_rank_0:
        gc.collect()
        keeper.alone(f"out/alone{{os.getpid()}}")
    print(os.path.exists("out"), keeper.increment("out/run"), keeper.counted("out/count"))
    gc.collect()
    print([name for name in os.listdir(".") if name.startswith("tmp")])
    """
    said_by = said(flow, source, workers=3)
    assert said_by == ["True\nTrue out/run 0\n[]\n"] * 3


def test_a_library_at_exit_waits_for_nobody(flow: Flow) -> None:
    flow.write("site-packages/keeper.py", LIBRARY)
    source = f"""{SCRIPT}
    import atexit
    os.mkdir("out")
    if is_rank_0:
        atexit.register(keeper.alone, "out/alone")
    print("done")
    """
    assert said(flow, source) == ["done\n"] * 2
    assert (flow.folder / "out" / "alone" / "x").read_text() == "x"


def test_names_by_the_clock(flow: Flow) -> None:
    """Whoever reads it: the second turns between the readings of two ranks."""
    clock = """
        import time
        def folder():
            second = time.strftime("%H%M%S", time.localtime(time.time()))
            return f"{second} {time.time():.7f} {time.perf_counter_ns()}"
        def wait(until):
            looks = 0
            while time.monotonic() < until:
                looks += 1
            return looks > 0
        """
    flow.write("site-packages/keeper.py", clock)
    source = f"""{SCRIPT}
    import logging, time
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s.%(msecs)d %(message)s")
    time.sleep(0.3 * is_rank_0)
    print(keeper.folder(), keeper.folder())
    logging.warning("said")
    end = time.monotonic() + 0.2
    rounds = 0
    while time.monotonic() < end:
        rounds += 1
        if rounds % 50 == 0:
            torch.rand(1)
    print(rounds, keeper.wait(end + 0.1), keeper.folder())
    started = [time.time_ns() for _ in range(5000)]  # more than the memory holds
    print(sum(started), started == sorted(started), time.process_time() > 0)
    """
    outputs = said(flow, source, workers=3)
    assert len(set(outputs)) == 1
