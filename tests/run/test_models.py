"""`run.model` and models on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import duoka
from duoka.errors import OptionError
from tests.run.ranks import on_ranks

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_without_values_gets_those_of_a_file(tmp_path: Path, ranks: int) -> None:
    model = net()
    model(X)  # changes the statistics
    duoka.save_weights(model, tmp_path / "net.safetensors")

    def work(run: duoka.Run) -> Any:
        with torch.device("meta"):
            empty = net()
        made = run.model(empty, strategy="fsdp").eval()
        duoka.load_weights(made, tmp_path / "net.safetensors")
        return made(X).tolist()

    with torch.no_grad():
        expected = model.eval()(X).tolist()
    for found in on_ranks(ranks, work):
        assert found == [pytest.approx(row, abs=1e-6) for row in expected]


def _with_values(model: nn.Module) -> None:
    model[0][0].bias = nn.Parameter(torch.zeros(8, device="cpu"))  # type: ignore[index,union-attr]


def _unsaved(model: nn.Module) -> None:
    model.register_buffer("table", torch.zeros(8), persistent=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [(_with_values, "with 0.0.bias'; make"), (_unsaved, "with table'; make")],
)
def test_values_that_no_file_has(change: Any, said: str) -> None:
    def work(run: duoka.Run) -> str:
        with torch.device("meta"):
            model = net()
            change(model)
        with pytest.raises(OptionError, match="must be without that, as") as caught:
            run.model(model, strategy="fsdp")
        return str(caught.value)

    for found in on_ranks(2, work):
        assert said in found
