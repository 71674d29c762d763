"""The tables of figures are those of benchmarks/results."""

from __future__ import annotations

import pytest

pytest.importorskip("tomllib")  # Python 3.11 has it, and the benchmarks need it

from benchmarks import readme, results
from benchmarks.results import FOLDER, Measured, Results
from tests.docs.pages import name


@pytest.mark.parametrize(
    ("page", "text"), list(readme.pages(results.read_all())), ids=lambda it: getattr(it, "name", "")
)
def test_tables_are_what_was_measured(page, text: str) -> None:  # type: ignore[no-untyped-def]
    assert page.read_text() == text, f"python -m benchmarks --readme makes {name(page)} anew"


def test_what_no_machine_has_measured_says_so() -> None:
    found = results.read(next(FOLDER.glob("*.json")))
    without = Results(found.machine, {"cuda": Measured("2026-01-01", 0.0, {"torch": "2"}, [])})
    table = list(readme.figures([without], readme.shown(), "english"))
    assert sum(line.endswith("| not measured |") for line in table) == len(readme.shown()["figure"])


def test_a_row_that_is_gone_is_told() -> None:
    words = readme.shown()
    words["figure"][0]["row"] = "no such row"
    with pytest.raises(LookupError, match="no such row"):
        readme.check(words, results.read_all())
