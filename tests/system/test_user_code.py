from __future__ import annotations

import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import nn

from duoka.system.user_code import user_frame, user_line


def line() -> int:
    """The number of the line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_the_line_that_is_running() -> None:
    assert user_line() == f"{Path(__file__).name}:{line()}"


def test_code_of_libraries_is_looked_past() -> None:
    class Model(nn.Module):
        forward = staticmethod(user_line)

    assert Model()() == f"test_user_code.py:{line()}"
    assert weakref.finalize(Model, user_line)() == f"test_user_code.py:{line()}"
    assert eval("user_line()") == f"test_user_code.py:{line()}"


def test_the_innermost_line_of_the_user_s_counts() -> None:
    def inner() -> str:
        return user_line()

    frame = inner.__code__.co_firstlineno + 1
    assert inner() == f"test_user_code.py:{frame}"


def test_a_thread_without_a_line_of_the_user_s() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(user_line).result() == "?"
        assert pool.submit(user_frame).result() is None


def test_what_a_library_generates_into_a_temporary_file_is_not_the_user_s(tmp_path: Path) -> None:
    source = "def call(function):\n    return function()\n"

    def line_from(module: str) -> str:
        space = {"__name__": module}
        exec(compile(source, str(tmp_path / "propagate_8dowkxbg.py"), "exec"), space)
        return str(space["call"](user_line))

    assert line_from("torch.nn.generated").startswith("test_user_code.py:")
    assert line_from("propagate") == line_from("mine.propagate") == "propagate_8dowkxbg.py:2"
