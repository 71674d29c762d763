"""The memory of tensors: its form, its writes, who shares it, and where a rank's rows are in one device's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from duoka.private.torch import (
    base_of,
    count_references,
    is_mapped_over,
    is_transformed,
    memory_of,
    negative_of,
    tree_leaves,
    version_of,
)
from duoka.view.shares.strides import Strides, global_distance
from duoka.view.transforms import without_modes

if TYPE_CHECKING:
    from duoka.view.tensor.spec import Spec


def gradient_version(rows: Tensor) -> int | None:
    """Return the number of writes to the gradient of this memory (`AliasedCopies.mark_gradient`).

    None if it is no gradient's, or if that is gone.
    """
    known = getattr(rows.untyped_storage(), "duoka_gradient", None)
    gradient = None if known is None else known()
    return None if gradient is None else version_of(gradient)


def form_of(tensor: Tensor) -> tuple[int, torch.Size, Strides]:
    """Return the place of a tensor's first element in its memory, its shape and its strides."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def same_form(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one memory are the same."""
    bits = tensor.is_conj() == other.is_conj() and tensor.is_neg() == other.is_neg()
    return bits and tensor.dtype == other.dtype and form_of(tensor) == form_of(other)


def blocks_of_memory(rows: Tensor, spec: Spec, strides: Strides) -> tuple[Spec, int] | None:
    """Return how the memory of a rank's rows is arranged: the placement of its samples, and the elements of each.

    None if it is no sequence of whole samples. strides: of the batch.
    """
    sample = strides[spec.dim] * spec.inner
    size, block = rows.untyped_storage().nbytes() // rows.itemsize, spec.partition.rows * sample
    if not block or size % block or spec.view.of_parameters:
        return None
    return replace(spec, dim=0, outer=size // block, inner=1), sample


def whole_memory(rows: Tensor, spec: Spec, strides: Strides) -> tuple[Spec, Tensor] | None:
    """Return all of the memory of a rank's rows: the placement of its samples, and these, shape (samples, elements).

    None as of `blocks_of_memory`.
    """
    blocks = blocks_of_memory(rows, spec, strides)
    if blocks is None:
        return None
    spec, sample = blocks
    return spec, as_in_memory(rows).as_strided((spec.local_size, sample), (sample, 1), 0).detach()


def offset_in_batch(rows: Tensor, spec: Spec, strides: Strides) -> int:
    """Return the place of a batch's first element in one device's memory, of which a rank's rows are.

    strides: of the batch.
    """
    sample, partition = strides[spec.dim] * spec.inner, spec.partition
    return global_distance(int(rows.storage_offset()), sample, partition.n, partition.rows)


def physical(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's memory as it is, where the tensor is to be read as its conjugate or negative."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return negative_of(tensor) if tensor.is_neg() else tensor


def as_in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory, without autograd, that is to be read as it is."""
    with without_modes():
        return physical(tensor.detach()).detach()  # a view would be a second reference to the memory


def history(tensor: Tensor) -> Any:
    """Return the node of autograd that a recorded write to a tensor, which may be a view, replaces."""
    return base_of(tensor).grad_fn


def version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor's memory; 0 for a tensor of the inference mode, which has no count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor that counts the writes to a tensor's memory, and does not hold that memory."""
    if tensor.is_inference():  # which counts none; autograd does not save it
        return tensor
    with without_modes():
        counter = as_in_memory(tensor)
        counter.data = counter.new_empty(0)
    return counter


def holders(tensor: Tensor) -> int:
    """Return the number of tensors and arrays that share this tensor's memory."""
    return count_references(tensor)


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are views of the same memory."""
    if tensor.layout is not torch.strided or tensor.device != other.device:
        return False
    return memory_of(tensor) == memory_of(other)


def overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return True if the memory of two tensors overlaps, of which one may have come from an array of the other's."""
    if other.layout is not torch.strided or tensor.device != other.device:
        return False
    here, there = tensor.untyped_storage(), other.untyped_storage()
    before = there.data_ptr() - here.data_ptr()
    return -there.nbytes() < before < here.nbytes()


def has_memory_of(full: Tensor, out: Any) -> bool:
    """Return True if a result that the script gets shares the memory of a copy."""
    return any(_is_of_memory(full, leaf) for leaf in ([out] if isinstance(out, Tensor) else tree_leaves(out)))


def _is_of_memory(full: Tensor, leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (is_transformed(leaf) or is_mapped_over(leaf)) and same_memory(leaf, full)
    if isinstance(leaf, np.ndarray):
        return bool(np.may_share_memory(leaf, full.detach().numpy()))
    return isinstance(leaf, (torch.UntypedStorage, torch.TypedStorage)) or type(leaf).__name__ == "PyCapsule"


def equal_bits(*tensors: Tensor) -> bool:
    """Return True if two tensors have the same bits: NaN equals itself, and 0.0 is not -0.0."""
    dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return torch.equal(*(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in dense))


def is_of_leaf(rows: Tensor) -> bool:
    """Return True if torch refuses a write to a tensor, as it is or views a leaf that requires a gradient."""
    return torch.is_grad_enabled() and base_of(rows).is_leaf and base_of(rows).requires_grad
