from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.utils import checkpoint

from duoka.private import torch as private


def test_groups_of_duokas_own_are_made_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """torch 2.10 writes to standard output whom gloo has met, and the script's lines would differ from python's."""
    with private.without_gloo_messages():
        distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=60))
    print("the script's")
    assert capfd.readouterr().out == "the script's\n"


def test_checkpoints_are_run_by_what_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each form in which torch lets them be called."""
    seen = []

    def run(original, function, args, kwargs):
        seen.append(function)
        return original(function, *args, **kwargs)

    replaced = private.around_checkpoints(run)(getattr(*private.CHECKPOINT))
    monkeypatch.setattr(*private.CHECKPOINT, replaced)
    layer, x = nn.Linear(2, 2), torch.ones(3, 2)
    checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    calls = 1
    if private.CHECKPOINT[1] != "checkpoint":  # before torch 2.15 there is no other form
        checkpoint.checkpoint(use_reentrant=False)(layer)(x).sum().backward()
        calls = 2
    assert seen == [layer] * calls
    assert layer.weight.grad is not None


def test_what_holds_memory_is_counted() -> None:
    tensor = torch.zeros(3)
    alone = private.count_references(tensor)
    view = tensor[1:]
    assert private.count_references(tensor) == alone + 1
    assert private.is_view(view)
    assert not private.is_view(tensor)
    assert private.memory_of(view) == private.memory_of(tensor) != private.memory_of(torch.zeros(3))
    before = private.version_of(tensor)
    view.add_(1)
    assert private.version_of(tensor) == before + 1


def test_whole_parameters_are_no_dtensors() -> None:
    assert not any(map(private.is_dtensor, nn.Linear(2, 2).parameters()))
