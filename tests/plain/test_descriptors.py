from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import said


def test_folders_are_read_in_one_order(flow: Flow) -> None:
    source = """
        import glob, os
        from pathlib import Path
        for number in range(40):
            Path(f"{number * 7919}.dat").touch()
        print(os.listdir(), [e.name for e in os.scandir()], glob.glob("*"), [*os.walk(".")])
        print([*map(str, Path().rglob("*"))])
        """
    first, other = said(flow, source)
    assert first == other


def test_temporary_files_that_have_a_name(flow: Flow) -> None:
    source = """
        import os, tempfile
        import numpy as np
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file.name, np.arange(3))
            print(file.name, np.load(file.name).sum())
        print(os.path.exists(file.name))
        kept = tempfile.NamedTemporaryFile("w", delete=False)
        kept.write("text")
        kept.close()
        print(kept.name, open(kept.name).read())
        os.unlink(kept.name)
        descriptor, name = tempfile.mkstemp()
        with os.fdopen(descriptor, "w") as file:
            file.write("more")
        print(name, open(name).read())
        os.remove(name)
        """
    first, other = said(flow, source)
    assert first == other
    assert [line.split()[-1] for line in first.splitlines()] == ["3", "False", "text", "more"]


def test_a_temporary_file_in_a_folder_of_the_script_is_there_once(flow: Flow) -> None:
    source = """
        import os, tempfile
        os.mkdir("saved")
        for name in ("first", "last"):
            file = tempfile.NamedTemporaryFile("w", delete=False, dir="saved")
            file.write(name)
            file.close()
            os.replace(file.name, f"saved/{name}")
        print(sorted(os.listdir("saved")), open("saved/last").read())
        """
    assert said(flow, source) == ["['first', 'last'] last\n"] * 2


def test_each_rank_has_its_own_shared_memory(flow: Flow) -> None:
    source = """
        import multiprocessing, tempfile
        epoch, sums = multiprocessing.Value("i", 1), multiprocessing.Array("d", 1000)
        epoch.value += 1
        sums[3] = epoch.value
        with tempfile.NamedTemporaryFile("w+", dir="/dev/shm") as file:
            file.write("text")
            file.flush()
            print(epoch.value, sum(sums), open(file.name).read())
        """
    assert said(flow, source) == ["2 2.0 text\n"] * 2
