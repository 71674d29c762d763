from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from duoka import environment
from duoka.errors import Refused
from duoka.options import Target
from duoka.supervision import tracebacks
from duoka.target import run_target


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
from duoka.options import Options, Target
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
from duoka.options import Options, Target
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
    assert "duoka" not in shown.replace("duoka.errors.OptionError", "").replace("from duoka.options", "")
    assert "The above exception was the direct cause" in shown
    assert "During handling of the above exception" in shown
    assert shown.rstrip().endswith("TypeError: worse")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_errors_of_a_group_are_trimmed_too(run: Callable[[str], BaseException]) -> None:
    source = """
from duoka.options import Options, Target
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
