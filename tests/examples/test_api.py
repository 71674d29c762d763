from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.flow import Flow, Warm
from tests.flows.reference import Reference

EXAMPLE = Path(__file__).parents[2] / "examples" / "api.py"


@pytest.fixture(scope="module")
def alone(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What plain python gives."""
    return Reference(Flow(warm, tmp_path_factory.mktemp("alone")), [EXAMPLE], "digits.pt")


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_the_example_gives_the_same(flow: Flow, alone: Reference, workers: int) -> None:
    result = flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", EXAMPLE]).ok()
    alone.assert_same(result.stdout, flow.folder / "digits.pt")
    assert float(result.stdout.split()[-1]) > 0.9


def test_it_can_be_read_aloud() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
