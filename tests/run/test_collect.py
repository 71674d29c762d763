"""Numbers of ranks that work by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import duoka
from tests.run.ranks import on_ranks


def test_sums_means_and_rows() -> None:
    def work(run: duoka.Run) -> Any:
        rank = run.rank
        rows = torch.arange(2.0 * rank).view(rank, 2)
        return (
            run.all_sum(rank + 1),
            run.all_sum({"a": torch.tensor([1, rank]), "b": [0.5]}),
            run.all_mean(rank),
            run.all_mean(torch.tensor([rank, 1])).tolist(),
            run.all_gather(rows).tolist(),
            run.all_gather({"flag": rank == 1})["flag"].tolist(),
            run.all_sum(True),
        )

    for found in on_ranks(3, work):
        total, nested, *rest = found
        assert total == 6
        assert nested["a"].tolist() == [3, 3]
        assert nested["b"] == [1.5]
        assert rest == [1.0, [1.0, 1.0], [[0, 1], [0, 1], [2, 3]], [False, True, False], 3]


def test_one_rank_is_all_ranks() -> None:
    def work(run: duoka.Run) -> Any:
        return run.all_sum(2), run.all_mean(3), run.all_gather(torch.ones(2)).tolist(), run.all_gather(1.5).tolist()

    assert on_ranks(1, work) == [(2, 3.0, [1.0, 1.0], [1.5])]


def test_what_is_the_whole_batchs_already_is_refused() -> None:
    def work(run: duoka.Run) -> Any:
        batch = run.batch(torch.ones(4, 2))
        with pytest.raises(duoka.OptionError, match="is the whole batch's already"):
            run.all_sum(batch)
        with pytest.raises(duoka.OptionError, match="given tensors, numbers, or dicts"):
            run.all_gather("text")
        return batch.sum().item()

    assert on_ranks(2, work) == [8.0, 8.0]


@pytest.mark.parametrize(
    ("of_rank", "text"),
    [
        (lambda rank: torch.ones(2, 3 + rank), r"\(rows, 3\)'.*\(rows, 4\)"),
        (lambda rank: torch.ones(2, dtype=torch.float64 if rank else torch.float32), "float32.*float64"),
        (lambda rank: {"a": 1} if rank else [1], "given"),
        (lambda rank: torch.ones(2, 3) if rank else "text", "text|str"),
    ],
    ids=["shape", "dtype", "tree", "type"],
)
def test_ranks_that_differ_are_told_on_all(of_rank: Any, text: str) -> None:
    def work(run: duoka.Run) -> Any:
        with pytest.raises(duoka.RanksApart, match=text):
            run.all_gather(of_rank(run.rank))
        return run.all_sum(1)

    assert on_ranks(2, work) == [2, 2]
