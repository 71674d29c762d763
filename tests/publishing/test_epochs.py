from __future__ import annotations

import linecache
import sys
from typing import Any

import pytest

from duoka.publishing.epochs import EpochLoop, epoch_loop

SETTING = """
class args:
    epochs = 5
CONFIG = {"epochs": 4}
START, END = 1, 3

def passes(loader):
    for x in loader:
        pass

class Loader:
    def __init__(self): self.seen = []
    def __iter__(self):
        self.seen.append(look())
        yield 1
loader = Loader()

def tqdm(numbers, **how): return numbers
def trange(number): return range(number)
class duokas:
    @staticmethod
    def epochs(number): return range(2, number)
duokas.__module__ = "duoka.checkpoint"
duokas = duokas()
"""

KNOWN = {
    "range(3)": (0, 3),
    "range(1, 3)": (0, 2),
    "range(START, END + 1)": (0, 3),
    "range(args.epochs)": (0, 5),
    'range(CONFIG["epochs"] - 1)': (0, 3),
    "range(10, 0, -5)": (0, 2),
    "tqdm(range(3), desc='x')": (0, 3),
    "trange(6)": (0, 6),
    "duokas.epochs(6)": (2, 6),
}
UNKNOWN = ("range(len([1, 2]))", "[1, 2, 3]", "range(int(3))", "enumerate(range(3))", "Loader()")


def seen(body: str) -> list[EpochLoop | None]:
    """What is found at each loop over a loader in a script."""
    source = SETTING + body
    name = f"/nowhere/train{abs(hash(body))}.py"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names: dict[str, Any] = {"look": lambda: epoch_loop(sys._getframe(1)), "__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    found: list[EpochLoop | None] = names["loader"].seen
    return found


@pytest.mark.parametrize("numbers", KNOWN)
def test_loops_that_are_known(numbers: str) -> None:
    first, rounds = KNOWN[numbers]
    found = seen(f"for epoch in {numbers}:\n    for x in loader:\n        pass\n")
    assert [(one.done, one.rounds, one.ends_early) for one in found if one] == [
        (number, rounds, False) for number in range(first, rounds)
    ]


@pytest.mark.parametrize("numbers", UNKNOWN)
def test_of_other_loops_nothing_is_said(numbers: str) -> None:
    assert set(seen(f"for epoch in {numbers}:\n    for x in loader:\n        pass\n")) == {None}


def test_in_functions_and_several_times_an_epoch() -> None:
    body = """
def main():
    for epoch in range(args.epochs - 3):
        passes(loader)
        with open("/dev/null"):
            for i, x in enumerate(loader):
                pass
main()
"""
    assert [one and one.done for one in seen(body)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("line", "ends_early"),
    [
        ("if epoch == 1: break", True),
        ("for y in []: break", False),
        ("while False:\n        break", False),
        ("try:\n        pass\n    except ValueError:\n        break", True),
        ("match epoch:\n        case 1:\n            break", True),
        ("def inner(): return 1", False),
    ],
)
def test_a_loop_that_may_end_early(line: str, ends_early: bool) -> None:
    found = seen(f"for epoch in range(2):\n    for x in loader:\n        pass\n    {line}\n")
    assert {one and one.ends_early for one in found} == {ends_early}


@pytest.mark.parametrize(
    "body",
    [
        "for epoch in range(END):\n    END = 2\n    for x in loader:\n        pass\n",  # the number has changed
        "for _ in range(END):\n    for x in loader:\n        _ = x\n",  # and so has the place
        "while True:\n    for x in loader:\n        pass\n    break\n",
        "for step in range(3):\n    x = next(iter(loader))\n",  # steps, not epochs
        "for x in loader:\n    pass\n",
    ],
)
def test_what_cannot_be_known_honestly(body: str) -> None:
    assert set(seen(body)) == {None}


def test_nothing_of_the_script_is_called() -> None:
    body = """
called = []
class Loud:
    @property
    def epochs(self):
        called.append(1)
        return 3
    def __getattr__(self, name):
        called.append(1)
        return 3
loud = Loud()
for epoch in range(loud.epochs):
    before = len(called)
    for x in loader:
        pass
    assert len(called) == before
"""
    assert set(seen(body)) == {None}
