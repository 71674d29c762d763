"""Values of a script's variables at its error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from duoka.errors import RanksApart
from duoka.options import Target
from duoka.supervision import ending
from duoka.supervision.ending import Ending
from duoka.supervision.values import AT_END_LINE, FrameValues, values_of
from duoka.target import run_target


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
        made = ending.raised(0, error)
    assert made.frames
    assert Ending.of(made.line()) == made
    assert ending.raised(0, ValueError("its own")).frames == []


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
