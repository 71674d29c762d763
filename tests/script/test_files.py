from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from duoka.errors import ScriptError
from duoka.script import Target
from duoka.script.target import sources


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def shown(target: Target) -> list[str]:
    return [source.shown for source in sources(target)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_local_imports_are_followed_nearest_first(here: Path) -> None:
    files = {
        "train.py": "import os, torch\ndef main():\n    import data\nfrom nets import Net\n",
        "data.py": "import train",
        "losses.py": "",
        "unused.py": "",
        "nets/__init__.py": "from .deep import Net\nfrom . import wide\n",
        "nets/deep.py": "from ..losses import loss\n",
        "nets/wide.py": "",
    }
    write(here, files)
    names = shown(Target("train.py"))
    assert sorted(names) == sorted(files.keys() - {"unused.py"})
    assert names[0] == "train.py"
    assert names[-1] == "losses.py"


def test_imports_start_where_the_script_is(here: Path) -> None:
    write(here, {"scripts/train.py": "import data", "scripts/data.py": "", "data.py": ""})
    assert shown(Target("scripts/train.py")) == ["train.py", "data.py"]


def test_imports_start_where_a_link_points(here: Path) -> None:
    write(here, {"scripts/train.py": "import data", "scripts/data.py": "", "data.py": ""})
    (here / "linked.py").symlink_to(here / "scripts/train.py")
    assert shown(Target("linked.py")) == ["train.py", "data.py"]


def test_site_packages_are_not_followed(here: Path) -> None:
    packages = here / "site-packages"
    packages.mkdir()
    (packages / "other.py").write_text("")
    (here / "link.py").symlink_to(packages / "other.py")
    write(here, {"train.py": "import link"})
    assert shown(Target("train.py")) == ["train.py"]


def test_what_does_not_parse_is_left_out(here: Path) -> None:
    write(here, {"train.py": "import broken, nul, fine", "broken.py": "x = = 1", "nul.py": "x\0", "fine.py": ""})
    assert shown(Target("train.py")) == ["train.py", "fine.py"]
    assert shown(Target("broken.py")) == []


def test_warnings_of_the_compiler_are_left_to_the_run(here: Path) -> None:
    write(here, {"train.py": "x = '\\d'\nassert (x, 'always true')\n"})
    assert shown(Target("train.py")) == ["train.py"]  # warnings are errors in these tests


def test_other_encodings(here: Path) -> None:
    (here / "train.py").write_bytes("# coding: latin-1\nx = 'é'\nimport data".encode("latin-1"))
    write(here, {"data.py": ""})
    assert shown(Target("train.py")) == ["train.py", "data.py"]


def test_a_module_is_found_without_running_its_parents(here: Path) -> None:
    files = {
        "pack/__init__.py": "raise SystemExit('run')",
        "pack/__main__.py": "from pack import data",
        "pack/data.py": "",
        "pack/deep/train.py": "import pack.data",  # deep is a package without __init__.py
    }
    write(here, files)
    train = Target("pack.deep.train", is_module=True)
    assert shown(train) == ["pack/deep/train.py", "pack/__init__.py", "pack/data.py"]
    assert shown(Target("pack", is_module=True)) == ["pack/__main__.py", "pack/__init__.py", "pack/data.py"]
    assert "pack" not in sys.modules


def test_an_installed_module_has_its_package_as_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = here / "lib/site-packages"
    write(packages, {"tool/__init__.py": "", "tool/train.py": "import tool.data, other", "tool/data.py": ""})
    write(packages, {"other.py": ""})
    monkeypatch.syspath_prepend(packages)
    names = shown(Target("tool.train", is_module=True))
    assert names == ["tool/train.py", "tool/__init__.py", "tool/data.py"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian.py", "there is no script 'trian.py'; did you mean 'train.py'?"),
        ("train", "there is no script 'train'; did you mean 'train.py'?"),
        ("folder/trian.py", "there is no script 'folder/trian.py'; did you mean 'folder/train.py'?"),
        ("other.py", "there is no script 'other.py'"),
        ("nowhere/train.py", "there is no script 'nowhere/train.py': there is no directory 'nowhere'"),
        ("json.tool", "there is no script 'json.tool'; to run a module write -m"),
        ("folder", "'folder' is a directory, and a script must be a file; to run a package write -m package"),
        ("", "'' is a directory"),
    ],
)
def test_a_script_that_is_not_there(here: Path, name: str, said: str) -> None:
    write(here, {"train.py": "", "folder/train.py": ""})
    with pytest.raises(ScriptError) as error:
        shown(Target(name))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pack.trian", "there is no module 'pack.trian'; did you mean 'pack.train'?"),
        ("pakc", "there is no module 'pakc'; did you mean 'pack'?"),
        ("pakc.train", "there is no module 'pakc.train': there is no package 'pakc'"),
        ("pack.train.deep", "there is no module 'pack.train.deep'"),
        ("pack", "'pack' is a package without __main__.py, which cannot be run"),
        ("train.py", "there is no module 'train.py'; to run a file leave -m out"),
        (
            "./train.py",
            "-m takes a module's name like package.module, and './train.py' is none; to run a file leave -m",
        ),
        ("", "-m takes a module's name"),
        ("sys", "there is no module 'sys'"),
    ],
)
def test_a_module_that_is_not_there(here: Path, name: str, said: str) -> None:
    write(here, {"train.py": "", "pack/__init__.py": "", "pack/train.py": ""})
    with pytest.raises(ScriptError) as error:
        shown(Target(name, is_module=True))
    assert str(error.value).startswith(said)


def test_a_pipe_is_not_read(here: Path) -> None:
    os.mkfifo(here / "pipe.py")
    with pytest.raises(ScriptError, match=r"'pipe\.py' is a pipe or a device"):
        shown(Target("pipe.py"))


def test_an_unreadable_script(here: Path) -> None:
    (here / "loop.py").symlink_to("loop.py")
    with pytest.raises(ScriptError, match=r"there is no script 'loop\.py'"):
        shown(Target("loop.py"))
