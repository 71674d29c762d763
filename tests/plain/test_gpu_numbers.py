"""On GPUs: tests/flows/test_cards.py."""

from __future__ import annotations

import torch

from duoka.plain.gpu_numbers import map_gpus
from duoka.plain.patching import Patches


def test_a_device_whose_name_is_no_method_of_tensors() -> None:
    patches, said = Patches(), list[str]()
    map_gpus(patches, torch.device("mps", 0), said.append)
    try:
        assert torch.zeros(2).to("cpu", torch.int8).dtype is torch.int8
    finally:
        patches.undo()
    assert not said
