"""Programs that other people wrote, unedited: what they print and save on 2 workers is what `python` gives.

    pytest -m long tests/programs --programs FOLDER

Their sources are not part of this project; what they train on is made here, tiny.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.flow import surroundings
from tests.programs.catalogue import PROGRAMS, SCRIPTS, Program
from tests.programs.compare import files_gap, text_gap

HERE = Path(__file__).parent
ROUNDING = 1e-4
TIMES = 4  # how much further apart than rounding alone takes it a program may be


@dataclass(frozen=True)
class Ran:
    """A run that ended well."""

    folder: Path
    stdout: str
    stderr: str
    seconds: float


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_gives_what_python_gives(
    program: Program, programs: Path, tmp_path: Path, table: list[str]
) -> None:
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"needs {program.needs}")
    if program.needs == "torch" and not (programs / program.script).is_file():
        pytest.skip(f"there is no {program.script} in {programs} (--programs FOLDER)")
    duoka = [Path(sys.executable).with_name("duoka"), "run", "--devices", "cpu:2", "--verbose", *program.options]
    one = run(program, programs, tmp_path / "python", [sys.executable])
    two = run(program, programs, tmp_path / "duoka", duoka)
    text, files = gaps(program, one, two)
    allowed = (ROUNDING, ROUNDING)
    if max(text, files) > ROUNDING:
        shaken = gaps(
            program, one, run(program, programs, tmp_path / "shaken", [sys.executable, SCRIPTS / "shaken.py"])
        )
        assert max(shaken) < math.inf, "this program amplifies rounding so much that nothing can be compared"
        allowed = (max(ROUNDING, TIMES * shaken[0]), max(ROUNDING, TIMES * shaken[1]))
    table += row(program, one, two, (text, files), allowed)
    assert text <= allowed[0], (text, one.stdout, two.stdout)
    assert files <= allowed[1]


def run(program: Program, programs: Path, folder: Path, words: list[str | Path]) -> Ran:
    """Copy the program into `folder`, and run it there, to its end."""
    script = program.copy(programs, folder)
    path = [str(folder)] if program.needs != "torch" else [str(HERE / "standins"), str(folder)]
    env = surroundings({"PYTHONPATH": os.pathsep.join(path), **program.env})
    seeded = [] if program.seeds else [SCRIPTS / "seeded.py"]
    start = time.perf_counter()
    result = subprocess.run(
        [*words, *seeded, script, *program.args], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return Ran(folder, result.stdout, result.stderr, time.perf_counter() - start)


def gaps(program: Program, one: Ran, other: Ran) -> tuple[float, float]:
    """How far apart two runs are in what they printed and in what they saved."""
    assert one.stdout.strip() or program.saved
    return text_gap(one.stdout, other.stdout), files_gap(one.folder, other.folder, program.saved)


def row(program: Program, one: Ran, two: Ran, found: tuple[float, float], allowed: tuple[float, float]) -> list[str]:
    """The program's lines in the table: figures, then what was computed whole by every rank, or read whole."""
    figures = f"{one.seconds:6.1f} {two.seconds:6.1f}  x{two.seconds / one.seconds:.2f}"
    apart = "  ".join(f"{gap:.0e} of {most:.0e}" for gap, most in zip(found, allowed, strict=True))
    whole = [line.removeprefix("duoka: ") for line in two.stderr.splitlines() if " whole by every rank" in line]
    return [f"{program.name:32}{figures}  {apart}", *(f"    {line}" for line in whole)]
