"""Programs that other people wrote, unedited: what they print and save on 2 workers is what `python` gives.

    pytest -m long tests/programs --programs FOLDER

Their sources are not part of this project; what they train on is made here, tiny.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.flow import Flow
from tests.programs.catalogue import PROGRAMS, SCRIPTS, Program
from tests.programs.compare import files_gap, text_gap

HERE = Path(__file__).parent
ROUNDING = 1e-4
STOOD_IN = ("torch", "gymnasium")  # what else such programs import has a stand-in
TIMES = 4  # how much further apart than rounding alone takes it a program may be


@dataclass(frozen=True)
class Ran:
    """A run that ended well."""

    folder: Path
    stdout: str
    stderr: str
    seconds: float


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.field}-{program.name}")
def test_a_program_gives_what_python_gives(
    program: Program, programs: Path, workers: list[int], flow: Flow, table: list[str]
) -> None:
    if importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"needs {program.needs}")
    if not program.is_ours and not (programs / program.script).is_file():
        pytest.skip(f"there is no {program.script} in {programs} (--programs FOLDER)")
    assert not missed(program, programs, workers, flow, table)


@pytest.mark.long
def test_a_program_that_seeds_nothing_is_named_so(tmp_path: Path, flow: Flow) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "drawing.py").write_text("import torch\nprint(torch.rand(()).item())\n")
    table: list[str] = []
    assert not missed(Program("drawing", "folder/drawing.py", "other"), tmp_path, [2], flow, table)
    assert "| unseeded |" in table[0]


def missed(program: Program, programs: Path, workers: list[int], flow: Flow, table: list[str]) -> list[object]:
    """What is not as under `python`, for each number of workers; `table` gets the program's lines.

    Nothing can be said of a program that prints something else when `python` runs it again.
    """
    one = run(program, programs, flow, "python", [])
    unseeded: bool | None = None
    wrong: list[object] = []
    for count in workers:
        command = ["run", "--devices", f"cpu:{count}", "--verbose", *program.options]
        other = run(program, programs, flow, f"duoka{count}", command)
        found = gaps(program, one, other)
        allowed, verdict = (ROUNDING, ROUNDING), "same" if max(found) == 0.0 else "rounding"
        if max(found) > ROUNDING:
            if unseeded is None:
                unseeded = max(gaps(program, one, run(program, programs, flow, "again", []))) > 0.0
            if unseeded:
                table += row(program, count, one, other, found, allowed, "unseeded")
                continue
            allowed, verdict = control(program, programs, flow, one, count), "rounding, shaken"
        if any(gap > most for gap, most in zip(found, allowed, strict=True)):
            verdict = "OTHER"
            wrong.append((count, found, allowed, one.stdout, other.stdout))
        table += row(program, count, one, other, found, allowed, verdict)
    return wrong


def control(program: Program, programs: Path, flow: Flow, one: Ran, workers: int) -> tuple[float, float]:
    """How far apart two runs may be: as far as rounding alone takes `python`, and a little more.

    Its weights are moved by one unit in the last place, or its batches are computed in parts, as on these workers.
    """
    ways: dict[str, list[str | Path]] = {
        "shaken": [SCRIPTS / "shaken.py"],
        f"parts{workers}": [SCRIPTS / "parts.py", str(max(workers, 2))],
    }
    found = [gaps(program, one, run(program, programs, flow, name, words)) for name, words in ways.items()]
    printed, saved = (TIMES * max(gap[place] for gap in found) for place in (0, 1))
    assert max(printed, saved) < math.inf, "this program amplifies rounding so much that nothing can be compared"
    return max(ROUNDING, printed), max(ROUNDING, saved)


def run(program: Program, programs: Path, flow: Flow, name: str, words: list[str | Path]) -> Ran:
    """Copy the program into the folder `name`, and run it there, to its end; torch has been imported before."""
    shutil.rmtree(flow.folder / name, ignore_errors=True)
    folder = flow.folder / name / "program"
    script = program.copy(programs, folder)
    path = [str(HERE / "standins"), str(folder)] if program.needs in STOOD_IN else [str(folder)]
    env = {"PYTHONPATH": os.pathsep.join(path), **program.env}
    short = [] if program.steps is None else [SCRIPTS / "short.py", str(program.steps)]
    args = [*words, *short, script, *program.args]
    start = time.perf_counter()
    how = "duoka" if name.startswith("duoka") else "python"
    result = flow.start(args, program=how, cwd=folder, env=env, timeout=600).wait(leaves_nothing=False).ok()
    return Ran(folder, result.stdout, result.stderr, time.perf_counter() - start)


def gaps(program: Program, one: Ran, other: Ran) -> tuple[float, float]:
    """How far apart two runs are in what they printed and in what they saved."""
    assert one.stdout.strip() or program.saved
    return text_gap(one.stdout, other.stdout), files_gap(one.folder, other.folder, program.saved)


def row(
    program: Program,
    workers: int,
    one: Ran,
    other: Ran,
    found: tuple[float, float],
    allowed: tuple[float, float],
    verdict: str,
) -> list[str]:
    """The program's lines in the table: figures, then what was computed whole by every rank, or read whole."""
    figures = f"{one.seconds:.1f} | {other.seconds:.1f}"
    apart = " | ".join(f"{gap:.0e} of {most:.0e}" for gap, most in zip(found, allowed, strict=True))
    told = [line.removeprefix("duoka: ") for line in other.stderr.splitlines()]
    whole = [line for line in told if " whole by every rank" in line]
    share = next((line.partition(" ")[0] for line in told if line[:1].isdigit() and "of the time" in line), "")
    name = f"{program.script} ({program.name}) | {program.field} | {workers}"
    return [f"| {name} | {verdict} | {figures} | {apart} | {len(whole)} {share}|"]
