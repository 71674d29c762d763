from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import duoka
from duoka.errors import BatchFailed
from tests.inference.models import Double, Failing


class Job:
    """Ranks as threads, which exchange pickled values as processes do."""

    def __init__(self, size: int) -> None:
        self.parts: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.parts)) as pool:
            futures = [pool.submit(function, Rank(self, rank)) for rank in range(len(self.parts))]
            return [future.exception() or future.result() for future in futures]


class Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.world_size = job, rank, len(job.parts)

    def gather_objects(self, value: Any) -> list[Any]:
        self.job.parts[self.rank] = pickle.dumps(value)
        self.job.barrier.wait()
        values = [pickle.loads(part) for part in self.job.parts]
        self.job.barrier.wait()
        return values


@given(st.integers(0, 30), st.integers(1, 7), st.integers(1, 4), st.sampled_from(["rows", "items", "lazily"]))
@settings(max_examples=30)
def test_every_rank_has_all_outputs_in_order(items: int, size: int, ranks: int, kind: str) -> None:
    def data() -> Any:
        rows = torch.arange(float(items))
        return {"rows": rows, "items": list(rows), "lazily": iter(rows)}[kind]

    def predict(rank: Rank) -> list[float]:
        return [
            output.item() for output in duoka.predict(Double(), data(), batch_size=size, devices="cpu", ranks=rank)
        ]

    assert Job(ranks).run(predict) == [[2.0 * item for item in range(items)]] * ranks


def test_each_batch_is_read_and_computed_by_one_rank() -> None:
    seen: list[float] = []

    class Items:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(float(index))
            return torch.tensor(float(index))

    Job(3).run(lambda rank: list(duoka.predict(Double(), Items(), batch_size=2, devices="cpu", ranks=rank)))
    assert sorted(seen) == [float(item) for item in range(20)]


def test_a_failure_of_one_rank_is_raised_by_all() -> None:
    def predict(rank: Rank) -> Any:
        model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
        return list(duoka.predict(model, torch.arange(30.0), batch_size=5, devices="cpu", ranks=rank))

    for error in Job(3).run(predict):
        assert isinstance(error, BatchFailed)
        assert error.indices == range(10, 15)
        assert str(error) == "items 10 to 14 on cpu: ValueError: unlucky"


def test_collected_failures_stand_in_their_places_on_every_rank() -> None:
    def predict(rank: Rank) -> list[int]:
        model = Failing(lambda x: bool((x == 13).any()), lambda: ValueError("unlucky"))
        how: dict[str, Any] = {"batch_size": 5, "devices": "cpu", "on_error": "collect", "ranks": rank}
        outputs = duoka.predict(model, torch.arange(30.0), **how)
        return [place for place, output in enumerate(outputs) if isinstance(output, BatchFailed)]

    assert Job(2).run(predict) == [[10, 11, 12, 13, 14]] * 2


def test_rows_travel_as_one_batch() -> None:
    sent: list[int] = []

    class Counting(Rank):
        def gather_objects(self, value: Any) -> list[Any]:
            sent.append(len(pickle.dumps(value)))
            return super().gather_objects(value)

    outputs = duoka.predict(
        Double(), torch.zeros(100, 1000), batch_size=100, devices="cpu", ranks=Counting(Job(1), 0)
    )
    assert len(list(outputs)) == 100
    assert max(sent) < 1.2 * 100 * 1000 * 4


def test_what_a_generator_raises_passes_through() -> None:
    def items() -> Iterator[torch.Tensor]:
        yield torch.tensor(1.0)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        list(duoka.predict(Double(), items(), batch_size=1))
