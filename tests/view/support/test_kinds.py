from __future__ import annotations

import pytest
import torch
from torch import nn

from duoka.view.support.kinds import holds_shards, is_compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_compiled() -> None:
    assert not is_compiled(nn.Linear(2, 2))
    assert is_compiled(torch.compile(nn.Linear(2, 2)))
    in_place = nn.Linear(2, 2)
    in_place.compile()
    assert is_compiled(in_place)


def test_whole_parameters_are_no_shards() -> None:
    assert not holds_shards(nn.Linear(2, 2))
