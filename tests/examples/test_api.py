from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result, Warm
from tests.flows.test_same_result import assert_same_lines, assert_same_weights

EXAMPLE = Path(__file__).parents[2] / "examples" / "api.py"


@pytest.fixture(scope="module")
def alone(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """What plain python gives, and the weights that it saves."""
    folder = tmp_path_factory.mktemp("alone")
    return Flow(warm, folder).python([EXAMPLE]).ok(), folder / "digits.pt"


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_the_example_gives_the_same(flow: Flow, alone: tuple[Result, Path], workers: int) -> None:
    expected, weights = alone
    result = flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", EXAMPLE]).ok()
    assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, flow.folder / "digits.pt")
    assert float(result.stdout.split()[-1]) > 0.9


def test_it_can_be_read_aloud() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
