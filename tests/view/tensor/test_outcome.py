from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.shares.strides import same_layout
from duoka.view.view import View
from tests.view.ranks import in_turns, on_ranks, shared, whole_of

# x: (n, 4, 6). A share of one row has several orders of dimensions that fit its strides.
LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x * 1,
    "transposed": lambda x: x.transpose(0, 1),
    "transposed and computed": lambda x: (x.transpose(0, 1) * 2).relu(),
    "turned": lambda x: x.permute(2, 0, 1) + 1,
    "time first, made contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "time first, by a layer": lambda x: F.linear(x.transpose(0, 1), torch.ones(5, 6)),
    "in one dimension": lambda x: x.transpose(0, 1).reshape(-1, 6),
    "stacked": lambda x: torch.stack([x, x], 1),
    "normalised": lambda x: F.layer_norm(x.transpose(0, 1), (6,)),
    "batch last": lambda x: x.flatten(1).t(),
    "there and back": lambda x: x.transpose(0, 1).transpose(0, 1),
    "attention of heads": lambda x: attention(x.unflatten(2, (2, 3)).transpose(1, 2)),
    "attention of heads by name": lambda x: attention_by_name(x.unflatten(2, (2, 3)).transpose(1, 2)),
    "attention of heads first": lambda x: attention(x.unflatten(2, (2, 3)).permute(2, 0, 1, 3)),
    "attention of columns": lambda x: attention(x.unflatten(2, (2, 3)).mT),
    "columns with BatchNorm": lambda x: F.batch_norm(columns(x), None, None, training=True),
    "columns with one-hot entries": lambda x: F.one_hot((columns(x) > 0).long(), 2).float(),
    "shuffled channels": lambda x: F.channel_shuffle(x.unflatten(2, (2, 3)).mT, 2),
}


def attention(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query)


def attention_by_name(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query=query, key=query, value=query)


def columns(x: Tensor) -> Tensor:
    return x.flatten(1).t().contiguous().t()


@pytest.mark.parametrize("lay", LAID_OUT.values(), ids=LAID_OUT)
@pytest.mark.parametrize(("n", "world_size"), [(2, 2), (3, 2), (4, 3)])
def test_what_is_drawn_for_a_share_of_one_row(lay: Callable[[Tensor], Tensor], n: int, world_size: int) -> None:
    """Random numbers fill memory in its order, so they tell how a rank believes that the whole lies."""

    def draw(x: Tensor) -> list[Tensor]:
        return [F.dropout(lay(x), 0.5), torch.randn_like(lay(x)), lay(x).clone().normal_(), F.dropout(lay(x), 0.3)]

    torch.manual_seed(5)
    whole = torch.randn(n, 4, 6)
    states = torch.get_rng_state()
    expected = draw(whole)
    torch.set_rng_state(states)
    for found in in_turns(world_size, lambda view: [whole_of(one) for one in draw(shared(view, whole))]):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)


@pytest.mark.parametrize("lay", LAID_OUT.values(), ids=LAID_OUT)
@pytest.mark.parametrize(("n", "world_size"), [(2, 2), (3, 2), (7, 3)])
def test_a_batch_has_the_strides_of_one_device(lay: Callable[[Tensor], Tensor], n: int, world_size: int) -> None:
    whole = torch.randn(n, 4, 6)
    expected = lay(whole)

    def on_rank(view: View) -> Any:
        out = lay(shared(view, whole))
        rows, meta = out._rows, out._meta  # type: ignore[attr-defined]
        assert same_layout(rows.shape, rows.stride(), meta.local_strides)
        return out.stride(), out.is_contiguous(), out.storage_offset(), out.full_tensor().stride()  # type: ignore[attr-defined]

    asked = expected.stride(), expected.is_contiguous(), 0, expected.stride()
    assert on_ranks(world_size, on_rank) == [asked] * world_size


def test_a_function_that_has_no_values_to_go_by_keeps_its_own_order() -> None:
    """`masked_select` cannot say without values how large its result is."""

    def on_rank(view: View) -> Any:
        x = shared(view, torch.ones(2, 4))
        return whole_of(x.masked_select(x > 0))

    for found in on_ranks(2, on_rank):
        assert found.tolist() == [1.0] * 8
