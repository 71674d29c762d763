from __future__ import annotations

from typing import Any

import pytest
import torch

from duoka.collectives.process import PartCollectives, ProcessCollectives
from tests.view.processes import all_well, in_processes


@pytest.mark.parametrize("nearby", [True, False])
def test_each_part_has_its_own_sums_and_all_count_them(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> Any:
        pair = [ranks.rank // 2 * 2, ranks.rank // 2 * 2 + 1]
        near = PartCollectives(ranks, pair, "near")
        far = PartCollectives(ranks, [ranks.rank % 2, ranks.rank % 2 + 2], "far")
        own = torch.tensor([10.0**ranks.rank])
        found = near.all_gather(own).view(-1).tolist(), far.all_reduce(own.clone()).item()
        sent = near.start_all_to_all(torch.arange(2.0).view(2, 1) + own)().view(-1).tolist()
        total = ranks.all_reduce(own).item()
        return (near.rank, near.world_size, *found, sent, total, ranks.begun)

    assert all_well(in_processes(4, work, nearby=nearby)) == [
        (0, 2, [1, 10], 101, [1, 10], 1111, 4),
        (1, 2, [1, 10], 1010, [2, 11], 1111, 4),
        (0, 2, [100, 1000], 101, [100, 1000], 1111, 4),
        (1, 2, [100, 1000], 1010, [101, 1001], 1111, 4),
    ]
