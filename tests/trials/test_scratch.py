from __future__ import annotations

from tests.flows.flow import Flow

BEGIN = """
import os, sys
from pathlib import Path
from duoka.trials.scratch import Scratch, redirect

redirect(Scratch(Path(sys.argv[1]) / "side" / "scratch"))
"""


def run(flow: Flow, source: str) -> None:
    """Run a script with redirected writes; its folder must be unchanged afterwards."""
    root = flow.folder.parent / f"{flow.folder.name}-scratch"
    (root / "side").mkdir(parents=True)
    path = flow.write("script.py", BEGIN)
    path.write_text(BEGIN + source)
    before = picture(flow)
    flow.python(["script.py", root]).ok()
    assert picture(flow) == before


def picture(flow: Flow) -> dict[str, str]:
    paths = (path for path in flow.folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_text() if path.is_file() else "" for path in paths}


def test_what_is_written_is_read_back(flow: Flow) -> None:
    flow.write("a.txt", "old")
    source = """
assert open("a.txt").read() == "old"
open("a.txt", "a").write(" and new")
assert Path("a.txt").read_text() == "old and new" and os.path.getsize("a.txt") == 11
with open("a.txt", "r+") as file:
    file.write("OLD")
assert Path("a.txt").read_bytes() == b"OLD and new"
try:
    open("a.txt", "x")
    raise SystemExit("a file was made that is there")
except FileExistsError as error:
    assert error.filename == "a.txt", error
try:
    open("nowhere/b.txt", "w")
    raise SystemExit("a file was made in no folder")
except FileNotFoundError:
    pass
descriptor = os.open("c.txt", os.O_CREAT | os.O_WRONLY)
os.write(descriptor, b"c")
os.close(descriptor)
assert open("c.txt").read() == "c"
os.chmod("a.txt", 0o600)
os.truncate("a.txt", 3)
assert open("a.txt").read() == "OLD"
"""
    run(flow, source)


def test_folders_are_seen_as_one(flow: Flow) -> None:
    for name in ("data/one.txt", "data/two.txt", "data/deep/three.txt"):
        flow.write(name, name)
    source = """
import glob, shutil
open("data/four.txt", "w").close()
os.remove("data/one.txt")
assert sorted(os.listdir("data")) == ["deep", "four.txt", "two.txt"]
assert sorted(entry.name for entry in os.scandir("data")) == ["deep", "four.txt", "two.txt"]
assert sorted(glob.glob("data/*.txt")) == ["data/four.txt", "data/two.txt"]
assert sorted(path.name for path in Path("data").rglob("*.txt")) == ["four.txt", "three.txt", "two.txt"]
for missing in (lambda: os.remove("data/one.txt"), lambda: open("data/one.txt"), lambda: os.stat("data/one.txt")):
    try:
        missing()
        raise SystemExit("what was removed is there")
    except FileNotFoundError:
        pass
try:
    os.rmdir("data")
    raise SystemExit("a folder was removed that is not empty")
except OSError:
    pass
shutil.copytree("data", "copy")
shutil.copy2("data/four.txt", "data/five.txt")
os.remove("data/five.txt")
assert open("copy/deep/three.txt").read() == "data/deep/three.txt"
os.chdir("data")
assert open("two.txt").read() == "data/two.txt" and os.path.exists("four.txt") and os.getcwd().endswith("/data")
os.chdir("../copy")
assert open("two.txt").read() == "data/two.txt"
os.makedirs("runs/1")
os.chdir("runs/1")
assert Path.cwd() == Path(__file__).parent / "copy/runs/1" and open("../../../data/two.txt").read() == "data/two.txt"
open("log.txt", "w").write("log")
assert Path("log.txt").absolute().read_text() == "log" and os.listdir() == os.listdir(os.getcwd()) == ["log.txt"]
assert open("../../two.txt").read() == "data/two.txt"
os.chdir("..")
assert os.listdir(".") == ["1"]
import sqlite3
sqlite3.connect(":memory:").execute("create table t (x)")
assert os.listdir() == ["1"]
os.chdir(Path(__file__).parent)
shutil.rmtree("data")
assert not os.path.exists("data/deep/three.txt") and not os.path.isdir("data")
os.makedirs("data/deep", exist_ok=True)
assert os.listdir("data/deep") == []
"""
    run(flow, source)


def test_renaming(flow: Flow) -> None:
    flow.write("best.pt", "best")
    flow.write("runs/1/log.txt", "log")
    source = """
import shutil
os.replace("best.pt", "last.pt")
assert open("last.pt").read() == "best" and not os.path.exists("best.pt")
Path("runs").rename("old")
assert open("old/1/log.txt").read() == "log" and not Path("runs").exists()
shutil.move("last.pt", "old/last.pt")
assert open("old/last.pt").read() == "best"
os.symlink("old/last.pt", "newest.pt")
assert os.path.islink("newest.pt")
try:
    os.rename("nothing", "something")
    raise SystemExit("nothing was renamed")
except FileNotFoundError:
    pass
"""
    run(flow, source)


def test_links_lead_to_copies(flow: Flow) -> None:
    flow.write("best.pt", "old")
    flow.write("runs/1/log.txt", "log")
    source = """
here = os.getcwd()
os.symlink(f"{here}/best.pt", "whole.pt")
os.symlink("best.pt", "part.pt")
assert open("whole.pt").read() == open("part.pt").read() == "old"
open("whole.pt", "w").write("new")
assert open("best.pt").read() == open("part.pt").read() == "new" and os.path.islink("whole.pt")
open("last.pt", "w").write("last")
Path("newest.pt").symlink_to(Path("last.pt").absolute())
assert Path("newest.pt").read_text() == "last" and os.path.realpath("newest.pt").endswith("/last.pt")
os.remove("newest.pt")
assert open("last.pt").read() == "last" and not os.path.lexists("newest.pt")
os.symlink(f"{here}/runs", "all")
os.symlink("all/1", "first")
open("first/log.txt", "a").write(" and more")
assert open("runs/1/log.txt").read() == "log and more" and os.listdir("first") == ["log.txt"]
os.symlink("b", "a")
os.symlink("a", "b")
try:
    open("a")
    raise SystemExit("a link to itself was opened")
except OSError:
    pass
"""
    run(flow, source)


def test_libraries_that_open_files_by_themselves(flow: Flow) -> None:
    flow.write("mine.pt", "no weights")
    source = """
import bz2, sqlite3, tarfile, tempfile, zipfile
import numpy as np, torch
from safetensors.torch import load_file, save_file
torch.save({"w": torch.ones(3)}, "mine.pt")
assert torch.load("mine.pt")["w"].sum() == 3
torch.save(torch.ones(1), Path("other.pt"))
np.save("a.npy", np.ones(2))
np.savetxt("a.txt", np.ones(2))
assert np.load("a.npy").sum() == 2 and np.loadtxt("a.txt").sum() == 2
with zipfile.ZipFile("a.zip", "w") as file:
    file.write("a.npy")
with tarfile.open("a.tar", "w") as file:
    file.add("a.npy")
with tarfile.open("a.tar") as file:
    assert file.getnames() == ["a.npy"]
with bz2.open("a.bz2", "wt") as file:
    file.write("a")
assert bz2.open("a.bz2", "rt").read() == "a"
save_file({"w": torch.ones(3)}, "a.safetensors")
assert load_file("a.safetensors")["w"].sum() == 3
connection = sqlite3.connect("a.db")
connection.execute("create table t (x)")
connection.commit()
assert os.path.exists("a.db")
with tempfile.NamedTemporaryFile() as file:
    assert file.name.startswith(sys.argv[1]), file.name
"""
    run(flow, source)


def test_sockets_stay_where_they_are(flow: Flow) -> None:
    source = """
import multiprocessing, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("s")
listener.listen()
os.chmod("s", 0o600)
assert os.stat("s").st_mode & 0o777 == 0o600
socket.socket(socket.AF_UNIX).connect("s")
os.unlink("s")
assert not os.path.exists("s")
multiprocessing.current_process()._config["tempdir"] = os.getcwd()
from multiprocessing import forkserver
forkserver.ensure_running()
forkserver._forkserver._stop()
"""
    run(flow, source)
