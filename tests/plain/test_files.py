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
        with pathlib.Path("out/log.csv").open("a", newline="") as file:
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
        import numpy as np
        os.makedirs("out", exist_ok=True)
        mistakes = [lambda: os.mkdir("out"), lambda: os.remove("none"), lambda: os.listdir("none")]
        mistakes += [lambda: np.save("none/array.npy", np.zeros(2)), lambda: open("text", "w", encoding="none")]
        for action in mistakes:
            try:
                action()
            except (OSError, LookupError) as error:
                print(type(error).__name__, error)
        open("new", "x").close()
        """
    as_python_twice = said(flow, source)
    assert as_python_twice[0] == as_python_twice[1]
    assert [line.split()[0] for line in as_python_twice[0].splitlines()] == [
        "FileExistsError",
        "FileNotFoundError",
        "FileNotFoundError",
        "FileNotFoundError",
        "LookupError",
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


def test_what_some_still_read_is_not_written_over(flow: Flow) -> None:
    source = """
        import os, time
        for late in (0, 1):
            time.sleep(0.2 * ((os.getpid() + late) % 2))
            with open(f"count{late}.txt") as file:
                count = int(file.read())
            with open(f"count{late}.txt", "w") as file:
                print(count + 1, file=file)
            print(count)
        """
    for late in (0, 1):
        flow.write(f"count{late}.txt", "1\n")
    assert said(flow, source) == ["1\n1\n"] * 2


def test_writers_of_all_kinds(flow: Flow) -> None:
    """Every file is written once, and read back by all, also while it is still open, or written by a thread."""
    source = """
        import atexit, csv, gzip, json, logging, os, pickle, shutil, sqlite3, tarfile, threading, zipfile
        from pathlib import Path
        import numpy as np

        shutil.rmtree("out", ignore_errors=True)
        Path("out/sub").mkdir(parents=True)
        os.chdir("out")
        logging.basicConfig(filename="log", format="%(message)s", level=logging.INFO)
        log = open("open.txt", "w")
        for step in range(3):
            logging.info("step %d", step)
            log.write(f"{step}\\n")
            log.flush()
            print(open("open.txt").read().split(), open("log").read().split())
        log.close()
        np.save("x.npy", np.arange(5)); np.savez("x.npz", a=np.ones(3)); pickle.dump([1], open("p", "wb"))
        mapped = np.memmap("mapped", mode="w+", shape=(4,), dtype="int64")
        mapped[:] = 7
        mapped.flush()
        print(np.load("x.npy").sum(), np.load("x.npz")["a"], pickle.load(open("p", "rb")))
        print(np.fromfile("mapped", "int64"))
        shutil.copy("p", "q")
        print(open("q", "rb").read())
        with gzip.open("g.gz", "wt") as file:
            file.write("zipped")
        with zipfile.ZipFile("z.zip", "w") as archive:
            archive.write("x.npy")
        with tarfile.open("t.tar", "w") as archive:
            archive.add("x.npy")
        print(gzip.open("g.gz", "rt").read(), zipfile.ZipFile("z.zip").namelist(), tarfile.open("t.tar").getnames())
        for mode in ("w", "a", "a", "r+"):
            with open("modes", mode) as file:
                file.write("abc")
        print(open("modes").read())

        base = sqlite3.connect("base.db")
        base.execute("create table steps (loss real)")
        for loss in (0.5, 0.25):
            base.execute("insert into steps values (?)", (loss,))
        base.commit()
        print(base.execute("select * from steps").fetchall())
        other = sqlite3.connect("base.db")
        other.execute("insert into steps values (1)")
        other.commit()
        print(other.execute("select count(*), sum(loss) from steps").fetchall())
        base.close(), other.close()
        print(sqlite3.connect("base.db").execute("select count(*) from steps").fetchall())

        def write():
            with open("events", "ab") as file:
                for number in range(5):
                    file.write(b"event ")

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        print(open("events").read())

        lock = os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(lock, b"held")
        os.close(lock)
        try:
            os.open("lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError as error:
            print(error, open("lock").read())
        for path in ("none/x", "open.txt"):
            try:
                open(path, "x")
            except OSError as error:
                print(type(error).__name__, error)

        Path("b.txt").write_text("b"), Path("sub/a.txt").write_text("a"), Path("sub/c.bin").touch()
        print(sorted(p.name for p in Path().iterdir()), [str(p) for p in Path().rglob("*.txt")].sort())
        print([(top, sorted(dirs), sorted(files)) for top, dirs, files in os.walk(".")])
        with os.scandir("sub") as entries:
            print(sorted((entry.name, entry.is_file(), entry.stat().st_size) for entry in entries))
        print(sorted(Path("sub").glob("*")), Path("b.txt").stat().st_size, os.path.islink("b.txt"))
        atexit.register(lambda: print(Path("b.txt").write_text("at the end")))
        """
    as_python(flow, source)
    assert (flow.folder / "out" / "b.txt").read_text() == "at the end"
    assert (flow.folder / "out" / "log").read_text() == "step 0\nstep 1\nstep 2\n"
    assert (flow.folder / "out" / "events").read_text() == "event " * 5


def test_every_rank_is_where_rank_0_is_in_a_file(flow: Flow) -> None:
    source = """
        import os, threading
        told = []
        for mode in ("w", "a", "ab", "xb"):
            with open(b"log" if "x" not in mode else "new", mode, buffering=1 if "b" not in mode else -1) as file:
                told += [file.tell(), file.write("abc" if "b" not in mode else b"abc"), file.tell(), file.name]
                file.flush()
                os.fsync(file.fileno())
                os.fdatasync(file)
        with open("new", "wb", buffering=0) as file:
            told += [file.write(memoryview(b"0123456789")), file.seek(-4, 1), file.write(b"x"), file.tell()]
            told += [file.seek(0, 2), file.truncate(8), file.tell(), file.seek(3), file.truncate()]
            os.ftruncate(file.fileno(), 2)
            for offset, whence in ((-1, 0), (-9, 2)):
                try:
                    file.seek(offset, whence)
                except OSError as error:
                    told.append(str(error))
        with open("text", "w", encoding="utf-16", newline="\\r\\n") as file:
            told += [file.write("多卡\\n"), file.tell(), file.readable(), file.seekable()]

        def write():
            with open(f"{os.getpid()}".encode(), "ab") as file:
                file.write(b"of a thread")

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        print(told)
        """
    first, other = said(flow, source)
    assert first == other
    assert "[0, 3, 3, b'log', 3, 3, 6, b'log', 6, 3, 9, b'log', 0, 3, 3, 'new', 10, 6, 1, 7, 10, 8," in first
    written = [path.read_bytes() for path in flow.folder.iterdir() if path.name.isdecimal()]
    assert written == [b"of a thread"]


def test_input_is_asked_once(flow: Flow) -> None:
    script = flow.write("script.py", "print(input())")
    logs = flow.folder / "logs"
    options = ["--quiet", "--devices", "cpu:2", "--log-dir", logs]
    assert flow.run(["run", *options, script], stdin="typed\nmore\n").ok().stdout == "typed\n"
    assert (logs / "rank1.log").read_text() == "typed\n"


def test_what_a_training_library_writes_for_the_script(flow: Flow) -> None:
    source = """
        import fsspec, os
        folder = fsspec.filesystem("file")
        folder.makedirs("out", exist_ok=False)
        with fsspec.open("out/a.txt", "w") as file:
            file.write("first")
        with folder.transaction:
            with folder.open("out/b.txt", "wb") as file:
                file.write(str(os.getpid()).encode())
        b = fsspec.open("out/b.txt", "r").open().read()
        print(fsspec.open("out/a.txt", "r").open().read(), b, sorted(folder.ls("out", detail=False)))
        folder.rm("out", recursive=True)
        print(folder.exists("out"))
        """
    first, other = said(flow, source)
    assert first == other
    assert "first" in first
    assert first.endswith("False\n")


def test_the_number_of_cores_is_rank_0_s(flow: Flow) -> None:
    source = """
        import multiprocessing, os
        import torch
        is_rank_0 = os.readlink("/proc/self/fd/0") != os.devnull
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1] if is_rank_0 else cores[-1:])
        print(os.sched_getaffinity(0) == set(cores[:1]), os.cpu_count() == multiprocessing.cpu_count())
        """
    assert said(flow, source) == ["True True\n"] * 2


def test_archives_are_rank_0_s(flow: Flow) -> None:
    source = """
        import bz2, io, os, tarfile, time
        is_rank_0 = os.readlink("/proc/self/fd/0") != os.devnull
        text = b"of rank 0" if is_rank_0 else b"of another"
        if not is_rank_0:
            time.sleep(0.3)  # so that it writes last
        with tarfile.open("a.tar", "w") as archive:
            member = tarfile.TarInfo("text")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        with bz2.open("text.bz2", "wb") as file:
            file.write(text)
        print(tarfile.open("a.tar").extractfile("text").read(), bz2.open("text.bz2").read())
        """
    assert said(flow, source) == ["b'of rank 0' b'of rank 0'\n"] * 2
