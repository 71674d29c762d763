"""Questions about the memory of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duoka.view.memory import (
    as_in_memory,
    equal_bits,
    form_of,
    has_memory_of,
    offset_in_batch,
    overlap,
    physical,
    same_form,
    same_memory,
    whole_memory,
)
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared


def test_views_are_of_one_memory_and_of_forms_of_their_own() -> None:
    x = torch.arange(12.0).view(3, 4)
    row = x[1]
    assert same_memory(row, x)
    assert not same_memory(x.clone(), x)
    assert form_of(row) == (4, (4,), (1,))
    assert same_form(row, x[1])
    assert not same_form(row, x[2])
    assert not same_form(row, row.view(torch.int32))


NAN = float("nan")


@pytest.mark.parametrize(("first", "other", "expected"), [(1.0, -1.0, False), (NAN, NAN, True), (0.0, -0.0, False)])
def test_values_are_compared_by_their_bits(first: float, other: float, expected: bool) -> None:
    assert equal_bits(torch.tensor([first]), torch.tensor([other])) is expected


def test_conjugates_are_read_as_they_are_in_memory() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]).requires_grad_()
    lazy = (x * 1).conj()
    assert not physical(lazy).is_conj()
    in_memory = as_in_memory(lazy)
    assert same_memory(in_memory, lazy)
    assert not in_memory.requires_grad
    assert torch.equal(in_memory, x.detach())


def test_what_is_made_of_a_copy_has_its_memory() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert has_memory_of(x, [None, x[0]])
    assert has_memory_of(x, x.numpy()[1])
    assert has_memory_of(x, x.untyped_storage())
    assert not has_memory_of(x, [x + 0, np.zeros(3)])
    assert overlap(x, torch.from_numpy(x.numpy()[1]))
    assert not overlap(x, x.clone())


def test_where_rows_are_in_the_batch_s_memory() -> None:
    def on_rank(view: View) -> tuple[int, tuple[int, ...], int]:
        x = shared(view, torch.arange(20.0).view(5, 4))
        column = x[:, 1]
        spec, rows, strides = column._spec, column._rows, column._meta.strides
        known = whole_memory(rows, spec, strides)
        assert known is not None
        return offset_in_batch(rows, spec, strides), tuple(known[1].shape), known[0].size

    assert on_ranks(2, on_rank) == [(1, (2, 4), 5), (1, (3, 4), 5)]
