from __future__ import annotations

from pathlib import Path

from tests.flows.flow import Flow
from tests.flows.test_same_result import assert_same_lines, assert_same_weights

EXAMPLE = Path(__file__).parents[2] / "examples" / "api.py"


def test_the_example_gives_the_same_on_two_workers(flow: Flow) -> None:
    one, two = flow.folder / "one", flow.folder / "two"
    one.mkdir()
    two.mkdir()
    alone = flow.python([EXAMPLE], cwd=one).ok()
    together = flow.run(["run", "--quiet", "--devices", "cpu:2", EXAMPLE], cwd=two).ok()
    assert_same_lines(alone.stdout, together.stdout)
    assert_same_weights(one / "digits.pt", two / "digits.pt")
    assert float(alone.stdout.split()[-1]) > 0.9


def test_it_can_be_read_aloud() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
