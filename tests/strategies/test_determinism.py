from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.backends import flags_frozen

from duoka.strategies.exact import be_deterministic
from tests.view.processes import all_well, forked


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_set(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own testing modules freeze such flags for the process.
    monkeypatch.setitem(flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", not frozen)

    def work(rank: int) -> Any:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if rank:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        be_deterministic(torch.device("cuda"))
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
        told = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
        return *told, os.environ["CUBLAS_WORKSPACE_CONFIG"]

    assert all_well(forked(2, work)) == [(True, True, ":4096:8"), (True, True, ":16:8")]
