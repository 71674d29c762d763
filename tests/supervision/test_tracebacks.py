"""Values of a script's variables at its error."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from duoka.errors import RanksApart, Refused
from duoka.script import Target
from duoka.script.target import run_target
from duoka.supervision import ending, tracebacks
from duoka.supervision.ending import Ending
from duoka.supervision.tracebacks import AT_END_LINE, FrameValues, values_of
from duoka.system import environment


def raised_by(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], BaseException]:
    """Runs a script that raises; returns what it raised."""
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(source: str) -> BaseException:
        script = tmp_path / "script.py"
        script.write_text(source)
        return raised_by(lambda: run_target(Target(str(script))))

    return run


def files(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def test_only_the_script_s_frames_are_left(run: Callable[[str], BaseException]) -> None:
    error = run("import json\njson.loads('{')")
    assert files(error)[:2] == ["test_tracebacks.py", "test_tracebacks.py"]
    tracebacks.trim(error)
    assert files(error) == ["script.py", "__init__.py", "decoder.py", "decoder.py"]


def test_frames_of_duoka_in_between_and_at_the_end_go_too(run: Callable[[str], BaseException]) -> None:
    source = """
from duoka.planning.options import Options
from duoka.script import Target
def f():
    Options(Target('x'), timeout=-1)
f()
"""
    error = run(source)
    assert files(error)[-1] == "options.py"
    tracebacks.trim(error)
    assert files(error) == ["script.py", "script.py"]


def test_chained_errors_are_trimmed_too(run: Callable[[str], BaseException]) -> None:
    source = """
from duoka.planning.options import Options
from duoka.script import Target
def f():
    try:
        Options(Target('x'), timeout=-1)
    except Exception as error:
        raise ValueError("boom") from error
try:
    f()
except ValueError:
    raise TypeError("worse")
"""
    error = run(source)
    tracebacks.trim(error)
    shown = tracebacks.shown(error)
    assert "duoka" not in shown.replace("duoka.errors.OptionError", "").replace("from duoka.planning.options", "")
    assert "The above exception was the direct cause" in shown
    assert "During handling of the above exception" in shown
    assert shown.rstrip().endswith("TypeError: worse")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_errors_of_a_group_are_trimmed_too(run: Callable[[str], BaseException]) -> None:
    source = """
from duoka.planning.options import Options
from duoka.script import Target
try:
    Options(Target('x'), timeout=-1)
except Exception as error:
    raise ExceptionGroup("two", [error, ValueError(1)])
"""
    error = run(source)
    tracebacks.trim(error)
    assert "options.py" not in tracebacks.shown(error)


def test_a_syntax_error_has_no_frames_left(run: Callable[[str], BaseException]) -> None:
    error = run("x = = 1")
    tracebacks.trim(error)
    assert error.__traceback__ is None
    assert tracebacks.shown(error).startswith('  File "')


def test_an_error_of_duoka_s_own_keeps_its_frames() -> None:
    error = raised_by(lambda: environment.first_set(3))  # type: ignore[arg-type]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    tracebacks.trim(error)
    assert files(error) == ["environment.py"]


def test_a_refusal_of_duoka_s_without_any_script_is_only_its_text() -> None:
    error = Refused("no")
    tracebacks.trim(error)
    assert tracebacks.shown(error) == "duoka.errors.Refused: no\n"


def test_errors_chained_in_a_circle_come_to_an_end() -> None:
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    tracebacks.trim(first)


def test_the_headline_is_the_last_line() -> None:
    assert tracebacks.headline(ValueError("boom")) == "ValueError: boom"
    assert tracebacks.headline(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.fixture(autouse=True)
def main_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what running a script changes."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))


SCRIPT = """
import os
from duoka import RanksApart
pid = 41
class Trainer:
    def __init__(self):
        self.step, self._hidden = 3, 4
    def fit(self, name):
        raise RanksApart("apart")
made = Trainer()
made.fit("first")
"""


def frames_of(folder: Path, source: str = SCRIPT) -> list[FrameValues]:
    script = folder / "train.py"
    script.write_text(source)
    with pytest.raises(RanksApart) as caught:
        run_target(Target(str(script)))
    return values_of(caught.value)


def test_the_frames_of_the_script_are_told_with_their_variables(tmp_path: Path) -> None:
    outer, inner = frames_of(tmp_path)
    assert (outer.function, outer.line, inner.function, inner.line) == ("<module>", 11, "fit", 9)
    assert outer.values == {"pid": "41", "made.step": "3"}
    assert inner.values == {"self.step": "3", "name": "'first'"}


def test_they_are_part_of_the_record_of_an_error_that_follows_another_rank(tmp_path: Path) -> None:
    try:
        frames_of(tmp_path, SCRIPT.replace("made.fit", "1 + made.fit"))
        raise RanksApart("apart")
    except RanksApart as error:
        made = ending.raised(error)
    assert made.frames
    assert Ending.from_line(made.line()) == made
    assert ending.raised(ValueError("its own")).frames == []


def test_after_the_scripts_end_its_global_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__, main.steps = "train.py", 4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    (frame,) = values_of(RanksApart("apart"))
    assert (frame.file, frame.line, frame.values) == ("train.py", AT_END_LINE, {"steps": "4"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("torch.tensor([1, 2])", "[1, 2]"),
        ("np.float64(0.5)", "0.5"),
        ("{'a': (1, None)}", "dict of 1: 'a': tuple of 2: 1, None"),
        ("[Named('x')]", "list of 1: Named(name='x')"),
        ("10 ** 5000", None),
        ("torch.ones(3, requires_grad=True)", None),
        ("lambda: 1", None),
    ],
)
def test_values_are_told_in_short(tmp_path: Path, value: str, expected: str | None) -> None:
    named = "class Named:\n    def __init__(self, name): self.name = name\n"
    source = f"import numpy as np, torch\n{named}value = {value}\nfrom duoka import RanksApart\nraise RanksApart('')"
    assert frames_of(tmp_path, source)[0].values.get("value") == expected


def test_long_values_that_differ_at_their_end_differ_in_short(tmp_path: Path) -> None:
    ends = "from duoka import RanksApart\nraise RanksApart('')"
    arrays = "import numpy as np\none, other = np.zeros(99), np.arange(99) // 98\n"
    source = f"{arrays}first, second = 'a' * 99, 'a' * 98 + 'b'\n{ends}"
    values = frames_of(tmp_path, source)[0].values
    assert len(set(values.values())) == len(values) == 4
    assert max(map(len, values.values())) < 100
    assert json.dumps(dict(values))
    assert np.__name__ not in values
    assert torch.__name__ not in values
