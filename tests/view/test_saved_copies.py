from __future__ import annotations

import pytest
import torch
from torch import Tensor

from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from duoka.view.whole import compute_whole
from tests.view.ranks import on_ranks, shared


def test_a_row_through_data_of_what_was_gathered_and_dropped() -> None:
    def sums(x: Tensor) -> list[float]:
        x.requires_grad_()
        found = [torch.trapezoid(x, dim=0).sum().item()]  # computed whole; nothing of it is kept
        row = x.data[2]
        found.append(row.sum().item())
        row.fill_(3)
        return [*found, x.sum().item(), torch.trapezoid(x, dim=0).sum().item()]

    start = torch.arange(20.0).view(5, 4)
    expected = sums(start.clone())
    assert on_ranks(2, lambda view: sums(shared(view, start))) == [expected] * 2


def test_a_write_to_what_autograd_has_saved_raises_torchs_error() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.rand(5, 4)).requires_grad_() * 1
        out = compute_whole(torch.square, (x,), {}).sum()  # has saved the gathered copy
        view.saved.count_writes()
        torch.autograd.grad(out, x, retain_graph=True)
        with torch.no_grad():
            x.mul_(2)
        view.saved.count_writes()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("counted", [True, False])
def test_a_write_to_a_plain_tensor_reaches_the_rows_that_were_copied_from_it(counted: bool) -> None:
    def on_rank(view: View) -> tuple[list[float], int]:
        plain = torch.arange(20.0).view(5, 4)
        batch = BatchTensor.of(plain, view)
        view.saved.note_split(batch._rows, batch._spec, plain)
        before = batch._rows._version
        if counted:
            plain.add_(1)
        else:
            plain.numpy()[...] += 1
        view.saved.copy_split()
        return batch.tolist(), batch._rows._version - before

    expected = (torch.arange(20.0).view(5, 4) + 1).tolist()
    for values, writes in on_ranks(2, on_rank):
        assert values == expected
        assert writes == int(counted)


def test_rows_that_were_written_since_keep_their_values() -> None:
    def on_rank(view: View) -> list[float]:
        plain = torch.arange(20.0).view(5, 4)
        batch = BatchTensor.of(plain, view)
        view.saved.note_split(batch._rows, batch._spec, plain)
        batch.zero_()
        plain.add_(1)
        view.saved.copy_split()
        return batch.tolist()

    assert on_ranks(2, on_rank) == [torch.zeros(5, 4).tolist()] * 2
