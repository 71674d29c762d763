"""Each rank writes its own rows of sharded tensors into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import duoka
from duoka.checkpoint import drafts
from duoka.checkpoint.rows import is_sharded
from tests.run.ranks import on_ranks

SHAPES = ((7, 5), (2, 9), (1, 2, 11), (4, 3, 2), (3,))


@pytest.mark.parametrize("world", [2, 3])
def test_rows_along_any_dimension_in_any_layout_are_at_their_place(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "PIECE", 16)

    def work(run: duoka.Run) -> list[Tensor]:
        model = nn.Module()
        model.all = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        model.all[0].data = model.all[0].data.t().contiguous().t()
        whole = [parameter.detach().clone() for parameter in model.all]
        state = dict(run.model(model, strategy="fsdp").state_dict())
        assert {value._spec.dim for value in state.values() if is_sharded(value)} == (
            {0, 1} if world == 2 else {0, 1, 2}
        )
        duoka.save_weights(model, tmp_path / "net.safetensors")
        return whole

    expected = on_ranks(world, work)[0]
    found = load_file(tmp_path / "net.safetensors")
    assert [found[f"all.{number}"].tolist() for number in range(len(SHAPES))] == [it.tolist() for it in expected]


def test_ranks_share_files_if_all_are_on_one_machine_and_see_them(tmp_path: Path) -> None:
    (tmp_path / "here").touch()

    def work(run: duoka.Run) -> list[bool]:
        ranks: Any = run._session.ranks

        def seen(path: Path, writes: bool = True) -> bool:
            return drafts.all_see(ranks, path, writes)

        found = [seen(tmp_path / "here"), seen(tmp_path / ("here" if run.rank == 0 else "nowhere"))]
        found.append(seen(tmp_path / ("here" if run.rank == 0 else "nowhere"), writes=run.rank == 0))
        name = drafts.machine_name
        drafts.machine_name = lambda: f"machine {run.rank}"
        found.append(seen(tmp_path / "here"))
        drafts.machine_name = name
        return found

    assert on_ranks(2, work) == [[True, False, True, False]] * 2
