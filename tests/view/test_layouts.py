"""What reads, keeps or changes the layout of a batch, and what shares its memory, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared, whole_of

Program = Callable[[Tensor], Any]


def transposed_copy(x: Tensor) -> Any:
    y = x.transpose(1, 2).contiguous()
    y += 1
    y.flatten(1).add_(2)
    return x, y


def contiguous_of_other_layouts(x: Tensor) -> Any:
    h = x + 0
    for _ in range(3):
        h.contiguous()
    y = h.transpose(1, 2).contiguous()
    y.mul_(10)
    return h, y


def expanded_row(x: Tensor) -> Any:
    x = x + 0
    x.unsqueeze(1).expand(6, 2, 4, 4)[0].zero_()
    return x, x.sum()


def shifted_labels(x: Tensor) -> Any:
    for n in (6, 3, 2):
        ids = (x[:n] * 10).long().flatten(1) if n == 6 else (x * 10).long().flatten(1)[:n]
        labels = ids[:, 1:].contiguous()
        labels[labels > 0] = -100
    return ids, labels


def reshaped_copy(x: Tensor) -> Any:
    y = x.transpose(1, 2).reshape(6, 16)
    y.zero_()
    z = x[:, 1:].flatten(1)
    z.add_(1)
    view = x.view(6, 16)
    view[:, 0] = 9
    return x, y, z, view


def squeezed(x: Tensor) -> Any:
    y = x.squeeze()
    y.attribute = 1  # type: ignore[attr-defined]
    same = [x.contiguous() is x, x.to(x.dtype) is x, x.float() is x, x.real is x, x.resolve_conj() is x]
    same += [x.squeeze() is x, x.view(x.shape) is x, x.expand(x.shape) is x, x[:, 0, 0].flatten() is x[:, 0, 0]]
    same += [torch.nn.functional.dropout(x, 0.5, training=False) is x, x.type(x.dtype) is x, (+x) is x, x.cpu() is x]
    return hasattr(x, "attribute"), same


def layouts(x: Tensor) -> Any:
    every = [
        x, x[:, ::2], x[:, 1:], x.transpose(1, 2), x.transpose(0, 1), x[:, 0], x.unsqueeze(1).expand(6, 3, 4, 4),
        x.flip(1), x.sort(1).values, x.transpose(1, 2).flip(1), x.transpose(0, 2) * 2,
        x.transpose(1, 2).sort(2).values,
        x.to(memory_format=torch.contiguous_format), x.unsqueeze(1).to(memory_format=torch.channels_last),
        x.transpose(1, 2).clone(), torch.empty_like(x.permute(2, 0, 1)), x.unfold(1, 2, 1), x.diagonal(0, 1, 2),
        x.unsqueeze(1).clone(memory_format=torch.channels_last), x.mT, x[:, None, :, 1], x.movedim(2, 1), x.detach(),
        x[x.sum((1, 2)) > 0], x.data, x.view(6, 16)[:, 3:], x.chunk(2, 2)[1], x.narrow(1, 1, 2), x.unbind(1)[2],
        torch.stack([x, x], 1), torch.cat([x.transpose(1, 2), x.transpose(1, 2)], 1), x.repeat(1, 2, 1),
        torch.where(x > 0, x, x.transpose(1, 2)), x @ x.mT, x.transpose(1, 2).softmax(1), x.cumsum(2), x.sum(1),
    ]  # fmt: skip
    return [(y.stride(), y.storage_offset(), y.is_contiguous(), y.shape) for y in every] + [
        every[13].is_contiguous(memory_format=torch.channels_last),
        every[3].dim_order(),
    ]


def strided(x: Tensor) -> Any:
    y = x.as_strided((2, 3), (16, 5))
    y.fill_(7)
    return x, x[:, 1:].as_strided((2, 2), (16, 1), 20), x.view(-1).as_strided((4, 5), (3, 1), 2)


def raising(x: Tensor) -> Any:
    def error(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return type(error).__name__
        return "nothing"

    return [
        error(call)
        for call in (
            lambda: x[:, 1:].view(-1),
            lambda: x.unsqueeze(1).expand(6, 2, 4, 4).view(6, -1),
            lambda: x.transpose(1, 2).view(6, 16),
            lambda: x[:, 0].expand(8, 2),
            lambda: x.squeeze(3),
            lambda: x.flatten(1, 5),
            lambda: x.unsqueeze(9),
            lambda: x.unflatten(4, (2, 2)),
            lambda: x.unsqueeze(1).expand(6, 2, 4, 4).add_(1),
            lambda: x.transpose(1, 5),
            lambda: x.view(5, 5),
        )
    ]


PROGRAMS = [
    transposed_copy,
    contiguous_of_other_layouts,
    expanded_row,
    shifted_labels,
    reshaped_copy,
    squeezed,
    strided,
    layouts,
    raising,
]


@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_does_what_it_does_on_one_device(program: Program, world_size: int) -> None:
    whole = torch.arange(-40.0, 56.0).view(6, 4, 4)  # sums without rounding

    def values(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return whole_of(tree).tolist()
        return [values(value) for value in tree] if isinstance(tree, (list, tuple)) else tree

    expected = [values(program(whole * (1 + step))) for step in range(4)]

    def on_rank(view: View) -> Any:
        return [values(program(shared(view, whole * (1 + step)))) for step in range(4)]

    for found in on_ranks(world_size, on_rank):
        assert found == expected


def test_as_strided_of_a_view_reaches_no_elements_outside_of_it() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(24).view(4, 6))
        with pytest.raises(Refused, match="outside of the batch"):
            x[:, 1:].as_strided((2, 2), (6, 5))
        with pytest.raises(Refused, match="outside of the batch"):
            x[:, 1:].as_strided((2, 2), (6, 1), 0)
        with pytest.raises(Refused, match="outside of the batch"):
            torch.as_strided_copy(x[:, ::2], (2, 2), (6, 1))
        with pytest.raises(Refused, match="outside of the batch"):
            x[:, 1:].as_strided_scatter(torch.zeros(2, 2), (2, 2), (6, 1), 0)

    on_ranks(2, on_rank)
