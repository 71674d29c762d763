from __future__ import annotations

from pathlib import Path

from tests.flows.flow import Flow
from tests.flows.test_same_result import assert_same_lines, assert_same_weights

EXAMPLE = Path(__file__).parents[2] / "examples" / "api.py"


def test_the_example_gives_the_same_on_any_number_of_workers(flow: Flow) -> None:
    one = flow.folder / "one"
    one.mkdir()
    alone = flow.python([EXAMPLE], cwd=one).ok()
    for workers in (1, 2, 3):
        many = flow.folder / str(workers)
        many.mkdir()
        together = flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", EXAMPLE], cwd=many).ok()
        assert_same_lines(alone.stdout, together.stdout)
        assert_same_weights(one / "digits.pt", many / "digits.pt")
    assert float(alone.stdout.split()[-1]) > 0.9


def test_it_can_be_read_aloud() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
