from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest

from duoka.cli import COMMANDS, main

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_help_and_version_come_from_the_installed_command(command: Command) -> None:
    assert command("--version").stdout == "duoka 0.1.0\n"
    help_ = command("--help")
    assert help_.returncode == 0
    assert "Run a training script on the devices you have." in help_.stdout
    assert command().stderr == help_.stdout


@pytest.mark.parametrize(
    ("args", "unwanted"),
    [
        (["--help"], ["torch", "numpy", "pynvml", "duoka.cli.run", "duoka.planning.plan"]),
        (["--version"], ["torch", "numpy", "pynvml", "duoka.cli.run", "duoka.planning.plan"]),
        (["run", "--help"], ["torch", "numpy", "pynvml", "duoka.launchers"]),
        (["forecast", "--help"], ["torch", "numpy", "pynvml", "duoka.launchers"]),
        (["gpus"], ["torch", "numpy", "rich", "duoka.planning.plan"]),
        (["run", "--dry-run", __file__], ["torch", "numpy", "duoka.launchers"]),
    ],
)
def test_nothing_is_imported_before_it_is_needed(args: list[str], unwanted: list[str]) -> None:
    source = f"import sys; from duoka.cli import main; code = main({args}); print(*sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert "duoka.cli" in imported
    assert not set(unwanted) & set(imported)


def test_every_command_in_the_table_is_there() -> None:
    for module, line in COMMANDS.values():
        assert isinstance(import_module(module).command, click.Command)
        assert line.endswith(".")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["rum"],
            "there is no command 'rum'; there is: doctor, forecast, gpus, predict, prove, run, watch, weights; "
            "did you mean `duoka run`?",
        ),
        (
            ["train.py"],
            "there is no command 'train.py'; there is: doctor, forecast, gpus, predict, prove, run, watch, weights; "
            "did you mean `duoka run train.py`?",
        ),
        (
            ["xyz"],
            "there is no command 'xyz'; there is: doctor, forecast, gpus, predict, prove, run, watch, weights\n",
        ),
        (["--hepl"], "no such option '--hepl'. Did you mean '--help'?"),
    ],
)
def test_what_there_is_not(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"duoka: error: {said}")
    assert err.endswith("\nduoka: see `duoka --help`\n")


def test_python_m_duoka_is_duoka() -> None:
    done = subprocess.run([sys.executable, "-m", "duoka", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "duoka 0.1.0\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)], ids=str)
def test_closed_standard_files_are_nothing_and_not_something_else(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Otherwise files opened next would get the numbers of the standard streams."""
    told = tmp_path / "told"
    program = f"""
import os
from duoka.cli import main
code = main(["--version"])
made = os.open({str(told)!r}, os.O_WRONLY | os.O_CREAT)
where = [os.readlink(f"/proc/self/fd/{{number}}") for number in {closed}]
os.write(made, f"{{code}} {{made > 2}} {{where}}".encode())
"""
    ends = " ".join(f"{number}>&-" if number else "<&-" for number in closed)
    subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {ends}', sys.executable, program], check=True, capture_output=True
    )
    assert told.read_text() == f"0 True {['/dev/null'] * len(closed)}"
