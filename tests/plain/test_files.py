from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, run, said


def test_files_are_written_once_and_read_back_by_all(flow: Flow) -> None:
    """In a folder below that of temporary files, where people train, too."""
    source = """
        import csv, json, os, pathlib, shutil
        import numpy as np

        os.mkdir("out")
        pathlib.Path("out/deep/er").mkdir(parents=True)
        with open("out/log.csv", "a", newline="") as file:
            csv.writer(file).writerow([1, 2])
        with open("out/log.csv", "a", newline="") as file:
            csv.writer(file).writerow([3, 4])
        print(list(csv.reader(open("out/log.csv"))))
        pathlib.Path("out/a.txt").write_text("text")
        print(pathlib.Path("out/a.txt").read_text(), os.path.getsize("out/a.txt"))
        np.save("out/x.npy", np.arange(2_000_000))
        print(np.load("out/x.npy").sum())
        with open("out/new", "x") as file:
            json.dump([1], file)
        os.rename("out/new", "out/old")
        shutil.copy("out/old", "out/copy")
        os.remove("out/old")
        print(sorted(os.listdir("out")), os.path.exists("out/old"), pathlib.Path("out/copy").is_file())
        shutil.rmtree("out")
        print(os.path.exists("out"))
        """
    as_python(flow, source, workers=3)


def test_files_that_numpy_opens_its_own_way(flow: Flow) -> None:
    source = """
        import numpy as np
        np.savetxt("x.txt", np.arange(30000))
        print(np.loadtxt("x.txt").sum(), np.genfromtxt("x.txt").shape)
        """
    as_python(flow, source, workers=3)


def test_what_rank_0_may_not_do_no_rank_may(flow: Flow) -> None:
    source = """
        import os
        os.makedirs("out", exist_ok=True)
        for action in (lambda: os.mkdir("out"), lambda: os.remove("none"), lambda: os.listdir("none")):
            try:
                action()
            except OSError as error:
                print(type(error).__name__, error)
        open("new", "x").close()
        """
    as_python_twice = said(flow, source)
    assert as_python_twice[0] == as_python_twice[1]
    assert [line.split()[0] for line in as_python_twice[0].splitlines()] == [
        "FileExistsError",
        "FileNotFoundError",
        "FileNotFoundError",
    ]
    again = run(flow, source)  # "new" is there already
    assert again.returncode == 1
    assert again.stderr.count("FileExistsError") == 1


def test_temporary_folders_are_one_and_the_same(flow: Flow) -> None:
    source = """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x")
            with open(path, "w") as file:
                file.write("text")
            print(folder, open(path).read())
        print(os.path.exists(folder))
        """
    first, other = said(flow, source)
    assert first == other
    assert first.splitlines()[0].endswith(" text")
    assert first.splitlines()[1] == "False"


def test_a_file_that_is_read_and_written_at_once(flow: Flow) -> None:
    source = """
        with open("log", "w") as file:
            for step in range(3):
                file.write(f"{step}\\n")
        with open("log", "r+") as file:
            print(file.read().split())
            file.write("more")
        print(open("log").read().split())
        """
    as_python(flow, source)


def test_input_is_asked_once(flow: Flow) -> None:
    script = flow.write("script.py", "print(input())")
    logs = flow.folder / "logs"
    options = ["--quiet", "--devices", "cpu:2", "--log-dir", logs]
    assert flow.run(["run", *options, script], stdin="typed\nmore\n").ok().stdout == "typed\n"
    assert (logs / "rank1.log").read_text() == "typed\n"
