"""The wheel, used without the checkout."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.flows.flow import ROOT, Flow, surroundings

SCRIPT = """
import duoka, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(7, 3), torch.randn(7, 1)), 7):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    print(len(x), f"{loss.item():.6f}", duoka.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # setuptools writes beside what it builds
    files = subprocess.run(
        ["git", "ls-files", "-z", "src", "*.toml", "setup.py", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, files.stdout.split("\0")):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes((ROOT / name).read_bytes())
    # What pip calls, which itself takes longer.
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=sources, check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("duoka-*.whl")
    return built


def test_it_trains_on_two_workers(wheel: Path, flow: Flow) -> None:
    """Unpacked, which is all that pip does with a wheel of Python alone, and found before the checkout."""
    installed = flow.folder / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    script = flow.write("script.py", SCRIPT)
    env = surroundings({}) | {"PYTHONPATH": os.fspath(installed)}
    command = [sys.executable, "-m", "duoka", "run", "--quiet", "--devices", "cpu:2", script]
    done = subprocess.run(command, cwd=flow.folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    (numbers,) = re.findall(r"7 \d+\.\d+ ", flow.python([script]).ok().stdout)
    assert done.stdout == f"{numbers}{installed}/duoka/__init__.py\n"


def test_it_has_an_engine_for_every_python(wheel: Path) -> None:
    """Also for those that this one cannot try: it uses nothing but Python's limited API."""
    if shutil.which("cc") is None:
        pytest.skip("there is no compiler")
    with zipfile.ZipFile(wheel) as archive:
        assert "duoka/view/dispatch/_replay.abi3.so" in archive.namelist()
    assert "-cp310-abi3-" in wheel.name


def test_its_description_stands_alone(wheel: Path) -> None:
    """Every link has its address, and pip tells what Pythons it is for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        told = email.message_from_bytes(archive.read(name))
        assert any(one.endswith("/py.typed") for one in archive.namelist())
        assert not [one for one in archive.namelist() if not one.startswith(("duoka/", "duoka-"))]
    readme = told.get_payload()
    assert isinstance(readme, str)
    links = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert len(links) > 20
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    (picture,) = (link for link in links if link.endswith("run.svg"))
    assert "/raw/" in picture
    assert told["Requires-Python"] == ">=3.10"
    assert any(one.endswith(":: 3.12") for one in told.get_all("Classifier") or [])
    assert len(told.get_all("Project-URL") or []) == 3
