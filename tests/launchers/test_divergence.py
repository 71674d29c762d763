"""The line by which ranks went apart, and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.launchers.divergence import divergence
from duoka.supervision.tracebacks import AT_END_LINE, FrameValues

SOURCE = """\
import os, helper
pid = os.getpid()
turn = pid % 2
for task in order(pid):
    if turn:
        print(loss)
    elif helper.ready():
        print(other)
    else:
        print(neither)
    match task.kind:
        case "a":
            print(a)
        case _:
            print(b)
    if os.getpid() == 7:
        continue
    print(end)
while done < 3:
    print(done)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


def at(script: str, line: int, function: str = "<module>", **values: str) -> FrameValues:
    return FrameValues(script, function, line, {name.replace("__", "."): text for name, text in values.items()})


def told(script: str, one: int, other: int, first: dict[str, str], second: dict[str, str]) -> list[str]:
    *lines, advice = divergence({0: [at(script, one, **first)], 1: [at(script, other, **second)]}, [(1,), (0,)])
    assert "must not decide" in advice
    return [line.strip() for line in lines]


def test_the_branch_and_the_source_of_its_value_are_told(script: str) -> None:
    lines = told(script, 6, 8, {"turn": "1", "pid": "41", "n": "3"}, {"turn": "0", "pid": "40", "n": "3"})
    assert lines == [
        "they went apart at train.py:5: if turn:",
        "turn is 1 on rank 0, 0 on rank 1: train.py:3: turn = pid % 2",
        "pid is 41 on rank 0, 40 on rank 1: train.py:2: pid = os.getpid()",
    ]


def test_an_attribute_is_traced_to_the_loop_that_gave_the_object(script: str) -> None:
    lines = told(script, 13, 15, {"task__kind": "'a'", "pid": "1"}, {"task__kind": "'b'", "pid": "2"})
    assert lines[:2] == [
        "they went apart at train.py:11: match task.kind:",
        "task.kind is 'a' on rank 0, 'b' on rank 1: train.py:4: for task in order(pid):",
    ]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (8, 10, "they went apart at train.py:7: elif helper.ready():"),
        (18, AT_END_LINE, "train.py:4: for task in order(pid): or train.py:16: if os.getpid() == 7:"),
        (20, AT_END_LINE, "they went apart at train.py:19: while done < 3:"),
        (6, 18, "they went apart at train.py:5: if turn:"),
    ],
)
def test_without_a_value_the_lines_are_told(script: str, one: int, other: int, expected: str) -> None:
    (line,) = told(script, one, other, {"n": "3"}, {"n": "3"})
    assert line.endswith(expected)


def test_ranks_at_the_same_line_differ_by_a_value(script: str) -> None:
    assert told(script, 18, 18, {"n": "3", "m": "1"}, {"n": "4", "m": "1"}) == ["n is 3 on rank 0, 4 on rank 1"]


def test_frames_are_compared_to_the_first_in_which_ranks_differ(script: str) -> None:
    one = [at(script, 2, pid="1"), at(script, 6, "fit", turn="0"), at(script, 10, "inner", x="1")]
    other = [at(script, 2, pid="1"), at(script, 8, "fit", turn="1")]
    lines = divergence({0: one, 1: other, 2: other}, [(0,), (1, 2)])
    assert "turn is 0 on rank 0, 1 on ranks 1 and 2" in lines[1]
    assert not any("x is" in line for line in lines)


def test_nothing_is_told_of_ranks_that_left_no_values(script: str) -> None:
    assert divergence({0: [at(script, 6, turn="1")], 1: []}, [(0,), (1,)]) == []
    assert divergence({0: [at(script, 6)], 1: [at("another.py", 8)]}, [(0,), (1,)]) == []


def test_a_branch_is_told_of_a_function_that_a_rank_has_left(script: str) -> None:
    inside = [at(script, 2, pid="1"), at(script, 20, "fit", done="1")]
    lines = divergence({0: inside, 1: [at(script, AT_END_LINE, pid="2")]}, [(0,), (1,)])
    assert [line.strip() for line in lines[:-1]] == [
        "they went apart at train.py:19: while done < 3:",
        "pid is 1 on rank 0, 2 on rank 1: train.py:2: pid = os.getpid()",
    ]


def test_a_source_that_cannot_be_read_leaves_the_values() -> None:
    lines = divergence({0: [at("gone.py", 1, x="1")], 1: [at("gone.py", 2, x="2")]}, [(0,), (1,)])
    assert lines[0] == "  x is 1 on rank 0, 2 on rank 1"
