from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.flows.flow import ROOT, Flow

SCRIPT = ROOT / "examples/digits.py"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
def test_any_number_of_workers_prints_and_saves_the_same(flow: Flow, workers: int) -> None:
    one = flow.python([SCRIPT, "--epochs", "2", "--save", "one.pt"]).ok()
    many = flow.run(["run", "--devices", f"cpu:{workers}", SCRIPT, "--epochs", "2", "--save", "many.pt"]).ok()
    assert one.stdout.count("\n") == 2
    assert many.stdout == one.stdout
    torch.testing.assert_close(
        weights(flow.folder / "many.pt"), weights(flow.folder / "one.pt"), rtol=1e-5, atol=1e-6
    )
