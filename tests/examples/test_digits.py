from __future__ import annotations

import pytest

from tests.flows.flow import ROOT, Flow
from tests.flows.reference import Reference

SCRIPT = ROOT / "examples/digits.py"


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_any_number_of_workers_prints_and_saves_the_same(flow: Flow, workers: int) -> None:
    words = [SCRIPT, "--epochs", "2", "--save", "digits.pt"]
    alone = Reference(flow, words, "digits.pt")
    many = flow.run(["run", "--devices", f"cpu:{workers}", *words]).ok()
    assert alone.stdout.count("\n") == 2
    alone.assert_same(many.stdout, flow.folder / "digits.pt")
