"""`duoka.predict` in a run: the ranks share the work by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import duoka
from tests.flows.flow import Flow
from tests.run.ranks import on_ranks

X = torch.randn(23, 5, generator=torch.Generator().manual_seed(1))


class Items:
    """Remembers what was read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return X[index]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


def expected() -> list[list[float]]:
    with torch.no_grad():
        return net().eval()(X).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_all_outputs_in_order_and_computes_its_own(ranks: int) -> None:
    def work(run: duoka.Run) -> Any:
        items = Items()
        outputs = duoka.predict(run.model(net()), items, batch_size=4).stack()
        return outputs.tolist(), items.read

    found = on_ranks(ranks, work)
    for outputs, _ in found:
        assert outputs == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected()]
    reads = [read for _, read in found]
    assert sorted(index for read in reads for index in read) == list(range(23))
    assert all(reads)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_of_the_run(ranks: int) -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(net())
        shuffled = run.loader(TensorDataset(X, torch.arange(23)), batch_size=5, shuffle=True)
        order = torch.cat([y + 0 for _, y in shuffled]).tolist()
        torch.manual_seed(8)
        outputs = duoka.predict(model, run.loader((X,), batch_size=5), inputs=lambda batch: batch[0]).stack()
        again = torch.cat([y + 0 for _, y in shuffled])
        return outputs.tolist(), len(order), len(again)

    for outputs, *sizes in on_ranks(ranks, work):
        assert outputs == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected()]
        assert sizes == [23, 23]


def test_in_the_middle_of_training_it_changes_nothing() -> None:
    def work(run: duoka.Run, predicts: bool) -> Any:
        model = run.model(net())
        for (x,) in run.loader((X,), batch_size=8, drop_last=True):
            model.zero_grad()
            model(x).square().mean().backward()
            if predicts:
                list(duoka.predict(model, X, batch_size=4))
        return [parameter.grad.tolist() for parameter in model.parameters()], torch.rand(()).item()

    assert on_ranks(2, lambda run: work(run, True)) == on_ranks(2, lambda run: work(run, False))


def test_a_rank_can_compute_all_by_itself() -> None:
    def alone(run: duoka.Run) -> Any:
        model = run.model(net())
        return duoka.predict(model, X, ranks=None, outputs="device").stack().tolist() if run.is_first else None

    outputs, nothing = on_ranks(2, alone)
    assert outputs == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in expected()]
    assert nothing is None


def test_what_one_rank_raises_all_raise() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> Tensor:
            if index == 9:
                raise ValueError("unreadable")
            return super().__getitem__(index)

    def work(run: duoka.Run) -> str:
        with pytest.raises(duoka.BatchFailed) as error:
            list(duoka.predict(run.model(net()), Broken(), batch_size=4))
        return str(error.value)

    one, other = on_ranks(2, work)
    assert one == other
    assert "items 8 to 11" in one


def test_under_duoka_run_rank_0_gets_everything_in_order(flow: Flow) -> None:
    script = flow.write(
        "script.py",
        """
        import duoka, os, torch

        class Looks(torch.nn.Module):
            def forward(self, x):
                with open(f"computed-{run.rank}", "a") as file:
                    file.writelines(f"{int(item)}\\n" for item in x)
                return x * 2

        run = duoka.start()
        outputs = duoka.predict(Looks(), torch.arange(100.0), batch_size=3).stack()
        run.print(outputs.tolist() == [2.0 * item for item in range(100)], len(outputs))
        """,
    )
    assert flow.run(["run", "--quiet", "--devices", "cpu:2", script]).ok().stdout == "True 100\n"
    shares = [(flow.folder / f"computed-{rank}").read_text().split() for rank in range(2)]
    assert sorted(int(item) for share in shares for item in share) == list(range(100))
    assert all(shares)


def test_batch_tensors_one_by_one_are_refused() -> None:
    def work(run: duoka.Run) -> list[str]:
        loader = run.loader((X,), batch_size=8)

        def batches() -> Iterator[Tensor]:
            for (x,) in loader:
                yield x * 2

        said = []
        for how in ({"data": batches(), "batch_size": None}, {"data": X, "outputs": "device"}):
            with pytest.raises(duoka.OptionError) as error:
                list(duoka.predict(run.model(net()), **how))  # type: ignore[arg-type]
            said.append(str(error.value))
        return said

    for data, outputs in on_ranks(2, work):
        assert "hand in the data set" in data
        assert "ranks=None" in outputs
