from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.view.shares.strides import (
    contiguous_strides,
    global_strides,
    is_dense,
    local_strides,
    memory_order,
    same_layout,
)


def test_the_order_of_dimensions_in_memory() -> None:
    x = torch.zeros(2, 3, 4)
    assert memory_order(x.stride()) == (0, 1, 2)
    assert memory_order(x.transpose(0, 1).stride()) == (1, 0, 2)
    assert memory_order(x.permute(2, 0, 1).stride()) == (1, 2, 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A tensor in any order of dimensions, some of them sliced or expanded, and the dimension of its samples."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    tensor = torch.arange(torch.Size(sizes).numel()).view(sizes).permute(order)
    dim = draw(st.integers(0, len(sizes) - 1))
    for other in set(range(len(sizes))) - {dim}:
        kind = draw(st.sampled_from(["all", "every second", "the rest", "expanded"]))
        if kind == "every second":
            tensor = tensor[(slice(None),) * other + (slice(None, None, 2),)]
        elif kind == "the rest" and tensor.shape[other] > 1:
            tensor = tensor.narrow(other, 1, tensor.shape[other] - 1)
        elif kind == "expanded" and tensor.shape[other] == 1:
            tensor = tensor.expand([3 if at == other else -1 for at in range(tensor.dim())])
    return tensor, dim


@given(layouts(), st.data())
def test_rows_and_batch_have_the_strides_of_tensors_that_are_laid_out_alike(
    laid: tuple[torch.Tensor, int], data: st.DataObject
) -> None:
    """A tensor with fewer samples, in the same order of dimensions and with the same gaps, has the rows' strides."""
    whole, dim = laid
    n = whole.shape[dim]
    rows = data.draw(st.integers(1, n))
    strides = local_strides(whole.stride(), dim, 1, n, rows)
    shape = [rows if at == dim else size for at, size in enumerate(whole.shape)]
    if rows > 1:
        assert same_layout(whole.shape, global_strides(strides, dim, 1, n, rows), whole.stride())
    if is_dense(whole.shape, whole.stride()):
        assert is_dense(shape, strides)
    if whole.is_contiguous():
        assert same_layout(shape, strides, contiguous_strides(shape))


@given(st.lists(st.integers(0, 4), max_size=4))
def test_the_strides_of_a_contiguous_tensor(sizes: list[int]) -> None:
    assert contiguous_strides(sizes) == torch.empty(sizes).stride()


@given(layouts())
def test_a_tensor_without_gaps(laid: tuple[torch.Tensor, int]) -> None:
    tensor, _ = laid
    storage = {int(value) for value in tensor.flatten()}
    dense = len(storage) == tensor.numel() and max(storage) - min(storage) == tensor.numel() - 1
    assert is_dense(tensor.shape, tensor.stride()) == dense
