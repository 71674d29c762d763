from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duoka.errors import ScriptError
from duoka.script import Target
from duoka.script.target import run_target
from tests.flows.flow import Flow

SHOW = """
import sys
seen = {name: repr(globals().get(name)) for name in (
    "__name__", "__file__", "__package__", "__doc__", "__cached__", "__annotations__", "__builtins__"
)}
print(sorted(seen.items()), type(__loader__).__name__, __spec__ and __spec__.name)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), sorted(globals()))
"""

Run = Callable[..., dict[str, Any]]

RUN = """
import sys
from duoka.script import Target
from duoka.script.target import run_target
run_target(Target(sys.argv[1], tuple(sys.argv[3:]), is_module=sys.argv[2] == "module"))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a target in this process, in a folder of its own, and returns the names that it leaves."""
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(name: str, *args: str, is_module: bool = False) -> dict[str, Any]:
        run_target(Target(name, args, is_module))
        return sys.modules["__main__"].__dict__

    return run


def interpreter(flow: Flow, *words: str) -> str:
    """Run a new interpreter, and return its output."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=flow.folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["script.py", "./sub/../script.py", "link.py", "sub/inner.py"])
def test_a_script_finds_what_python_gives_it(flow: Flow, name: str) -> None:
    flow.write("script.py", SHOW)
    flow.write("sub/inner.py", SHOW)
    (flow.folder / "link.py").symlink_to("sub/inner.py")
    runner = flow.write("runner/run.py", RUN)
    assert flow.python([runner, name, "script", "a"]).ok().stdout == interpreter(flow, name, "a")


@pytest.mark.parametrize("name", ["module", "package.inner", "package"])
def test_a_module_finds_what_python_gives_it(flow: Flow, name: str) -> None:
    for path in ("module.py", "package/inner.py", "package/__main__.py"):
        flow.write(path, SHOW)
    flow.write("package/__init__.py", "import sys; print('parent sees', sys.argv)")
    runner = flow.write("runner/run.py", RUN)
    assert flow.python([runner, name, "module", "a"]).ok().stdout == interpreter(flow, "-m", name, "a")


def test_first_args_stand_before_the_script_s_own(tmp_path: Path, run: Run) -> None:
    (tmp_path / "script.py").write_text("import sys; args = sys.argv[1:]")
    run_target(Target("script.py", ("--a",)), ["--local-rank=1"])
    assert sys.modules["__main__"].__dict__["args"] == ["--local-rank=1", "--a"]


def test_the_main_module_stays(tmp_path: Path, run: Run) -> None:
    (tmp_path / "script.py").write_text("x = 1\ndef f(): return x")
    names = run("script.py")
    assert sys.modules["__main__"].__dict__ is names
    assert names["f"]() == 1


def test_a_file_in_another_encoding(tmp_path: Path, run: Run) -> None:
    (tmp_path / "script.py").write_bytes("# coding: latin-1\nx = 'é'".encode("latin-1"))
    assert run("script.py")["x"] == "é"


def test_features_of_this_file_are_not_the_script_s(tmp_path: Path, run: Run) -> None:
    (tmp_path / "script.py").write_text("def f(x: int): ...")
    assert run("script.py")["f"].__annotations__ == {"x": int}  # not text, as they are here


@pytest.mark.parametrize("error", ["SystemExit(3)", "ValueError('x')", "KeyboardInterrupt()"])
def test_what_is_raised_passes_through(tmp_path: Path, run: Run, error: str) -> None:
    (tmp_path / "script.py").write_text(f"raise {error}")
    with pytest.raises(type(eval(error))):
        run("script.py")


def test_a_script_that_is_not_there(run: Run) -> None:
    with pytest.raises(ScriptError, match=r"the script nothing\.py cannot be read: No such file"):
        run("nothing.py")


@pytest.mark.parametrize("name", ["nothing", "json.nothing", "nothing.at.all", "sys"])
def test_a_module_that_is_not_there_or_cannot_be_run(run: Run, name: str) -> None:
    with pytest.raises(ScriptError, match=f"there is no module {name} that could be run"):
        run(name, is_module=True)


def test_a_module_whose_package_imports_what_is_missing(tmp_path: Path, run: Run) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text("import nothing_of_that_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        run("broken.train", is_module=True)


def test_runpy_is_not_needed(tmp_path: Path, run: Run) -> None:
    """Its module is gone when the script ends, and its frames stand in every traceback."""
    (tmp_path / "script.py").write_text("class Net: ...")
    names = run("script.py")
    assert names["Net"].__module__ == "__main__"
    assert sys.modules[names["Net"].__module__].__dict__["Net"] is names["Net"]
    assert runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")["Net"] is not names["Net"]
