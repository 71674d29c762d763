from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duoka.publishing import values
from tests.publishing.made import publisher


class SummaryWriter:
    """The two methods of TensorBoard's, with their arguments."""

    def __init__(self) -> None:
        self.written: list[object] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: object,
        global_step: object = None,
        walltime: object = None,
        new_style: bool = False,
    ) -> None:
        self.written.append((tag, scalar_value, global_step, walltime))

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: dict[str, object], global_step: object = None, walltime: object = None
    ) -> None:
        self.written.append((main_tag, tag_scalar_dict, global_step))


class Run:
    """W&B's run, with the arguments of its `log`."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> str:
        if not isinstance(data, dict):
            raise ValueError("data")
        return "logged"


def test_tensorboards_calls() -> None:
    ours = publisher()
    values.install_tensorboard(ours, SimpleNamespace(SummaryWriter=SummaryWriter))
    writer = SummaryWriter()
    writer.add_scalar("train/loss", torch.tensor(0.5), 3)
    writer.add_scalar("acc", scalar_value=np.float32(0.25), global_step=4, walltime=1.0)
    writer.add_scalars("lr", {"a": 1, "b": 2})
    assert writer.written == [
        ("train/loss", torch.tensor(0.5), 3, None),
        ("acc", np.float32(0.25), 4, 1.0),
        ("lr", {"a": 1, "b": 2}, None),
    ]
    found = [(value.name, value.step, value.value) for _, value in ours.board.script_output.logged(0)]
    assert found == [("train/loss", 3, 0.5), ("acc", 4, 0.25), ("lr/a", None, 1.0), ("lr/b", None, 2.0)]


def test_wandbs_calls_and_their_errors() -> None:
    ours = publisher()
    values.install_wandb(ours, SimpleNamespace(Run=Run))
    assert Run().log({"loss": 1.5, "image": object(), "table": {"x": 1}}, commit=False) == "logged"
    with pytest.raises(ValueError, match="data"):
        Run().log(3)  # type: ignore[arg-type]
    assert [(value.name, value.value) for _, value in ours.board.script_output.logged(0)] == [("loss", 1.5)]


def test_a_tensor_that_other_ranks_may_have_to_read_is_left_alone() -> None:
    class Shared(torch.Tensor):
        """Reading it would wait for other ranks."""

        def item(self) -> float:
            raise AssertionError("it was read")

    ours = publisher()
    values._log(ours, None, {"x": torch.tensor(1.0).as_subclass(Shared)})
    assert list(ours.board.script_output.logged(0)) == []
