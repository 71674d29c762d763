"""Views, permutations, pieces and indexing: the batch moves to another place, or stays."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.batch import BatchTensor, Rule, Spec
from duoka.view.rules.blocks import repeat_interleave, split
from duoka.view.rules.lookup import Function, argument, functions, getters, sizes_of, wrap


def place_after_reshape(shape: tuple[int, ...], spec: Spec, target: list[int]) -> Spec | None:
    """Where the batch is after a reshape from global `shape` to global `target`; None if it is torn apart.

    Elements count as (before, n, after); one dimension of the target must be (outer, n, inner) with the
    dimensions left of it making up the rest of `before`.
    """
    before, n = prod(shape[: spec.dim]) * spec.outer, spec.cut.n
    left = 1
    for dim, size in enumerate(target):
        outer = before // left
        if left * size > before and before % left == 0 and size % (outer * n) == 0:
            return replace(spec, dim=dim, outer=outer, inner=size // (outer * n))
        if before % (left * size) != 0:
            return None
        left *= size
    return None


def _reshaped(batch: BatchTensor, target: list[int]) -> Any:
    shape, total = tuple(batch.shape), batch.numel()
    if target.count(-1) == 1:
        known = -prod(target)
        if known == 0 or total % known:
            return NotImplemented
        target = [total // known if size == -1 else size for size in target]
    if prod(target) != total or total == 0:
        return NotImplemented
    spec = place_after_reshape(shape, batch._spec, target)
    if spec is None:
        return NotImplemented
    target[spec.dim] = spec.local_size
    return BatchTensor(batch._local.reshape(target), spec)


def reshape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """view, reshape and their kind."""
    batch = args[0]
    if not isinstance(batch, BatchTensor):  # reshape_as(a batch): only its shape is asked for
        return func(batch, torch.empty(args[1].shape, device="meta")) if _is_as(func) else NotImplemented
    if _is_as(func):
        return _reshaped(batch, list(argument(args, kwargs, 1, "other").shape))
    if isinstance(argument(args, kwargs, 1, "dtype"), torch.dtype):
        return NotImplemented
    return _reshaped(batch, sizes_of(args, kwargs, "size" if func is Tensor.view else "shape"))


def _is_as(func: Function) -> bool:
    return func in (Tensor.view_as, Tensor.reshape_as)


def flatten(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """flatten(start_dim=0, end_dim=-1)."""
    batch = args[0]
    shape = list(batch.shape)
    start = argument(args, kwargs, 1, "start_dim", 0) % len(shape)
    end = argument(args, kwargs, 2, "end_dim", -1) % len(shape)
    return _reshaped(batch, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """unflatten(dim, sizes)."""
    batch, shape = args[0], list(args[0].shape)
    dim, sizes = argument(args, kwargs, 1, "dim") % len(shape), list(argument(args, kwargs, 2, "sizes"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -prod(sizes)
    return _reshaped(batch, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def squeeze(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """squeeze(): dimensions of global size 1 only, whatever this rank's share is."""
    batch = args[0]
    ndim, shape = batch.dim(), tuple(batch.shape)
    dim = argument(args, kwargs, 1, "dim")
    asked = range(ndim) if dim is None else [d % ndim for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
    gone = [d for d in asked if shape[d] == 1]
    if not gone:
        return batch
    out = batch._local.squeeze(tuple(gone))
    return BatchTensor(out, batch._spec.at(batch._spec.dim - sum(d < batch._spec.dim for d in gone)))


def unsqueeze(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """unsqueeze(dim)."""
    batch, spec = args[0], args[0]._spec
    dim = argument(args, kwargs, 1, "dim") % (batch.dim() + 1)
    return BatchTensor(batch._local.unsqueeze(dim), spec.at(spec.dim + (dim <= spec.dim)))


def permute(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any reordering of dimensions: told from what it does to dimensions of sizes 1, 2, 3 and so on."""
    batch = args[0]
    probe = torch.empty(tuple(range(1, batch.dim() + 1)), device="meta")
    order = func(probe, *args[1:], **kwargs).shape
    return BatchTensor(
        func(batch._local, *args[1:], **kwargs), batch._spec.at(list(order).index(batch._spec.dim + 1))
    )


def expand(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """expand(sizes): the batch's own dimension stays as it is."""
    batch = args[0]
    if not isinstance(batch, BatchTensor):  # expand_as(a batch)
        return func(batch, torch.empty(args[1].shape, device="meta")) if func is Tensor.expand_as else NotImplemented
    sizes = (
        list(argument(args, kwargs, 1, "other").shape) if func is Tensor.expand_as else sizes_of(args, kwargs, "size")
    )
    dim = batch._spec.dim + len(sizes) - batch.dim()
    sizes[dim] = -1
    return BatchTensor(batch._local.expand(sizes), batch._spec.at(dim))


def pieces(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """chunk, split, unbind, narrow, select, roll, flip along another dimension."""
    batch, spec, name = args[0], args[0]._spec, func.__name__
    place = 1 if name in ("unbind", "narrow", "select", "flip") else 2
    dim = argument(args, kwargs, place, "dims" if name in ("flip", "roll") else "dim", 0 if name in _SPLITS else None)
    if not isinstance(dim, int) or (len(args) > 2 and name == "flip"):
        return NotImplemented
    if dim % batch.dim() == spec.dim:
        return split(batch, func, args, kwargs) if name in _SPLITS and name != "unbind" else NotImplemented
    dim %= batch.dim()
    dropped = name in ("unbind", "select") and dim < spec.dim
    return wrap(func(batch._local, *args[1:], **kwargs), spec.at(spec.dim - dropped))


_SPLITS = ("chunk", "split", "unbind", "tensor_split", "split_with_sizes")


def of_each_matrix(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations on the last two dimensions, the batch not among them."""
    batch = args[0]
    if batch._spec.dim >= batch.dim() - 2:
        return NotImplemented
    out = func(batch._local, *args[1:], **kwargs)
    return batch if out is batch._local else BatchTensor(out, batch._spec)


def pad(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.pad of other dimensions."""
    batch, sizes = args[0], argument(args, kwargs, 1, "pad")
    first = batch.dim() - len(sizes) // 2  # the pairs of `pad` begin at the last dimension
    if batch._spec.dim >= first:
        return NotImplemented
    return BatchTensor(func(batch._local, *args[1:], **kwargs), batch._spec)


def of_a_batch(rule: Rule) -> Rule:
    """The rule where the first argument is a batch and no other is; else the whole is computed."""

    def only(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not isinstance(args[0], BatchTensor) or any(isinstance(a, BatchTensor) for a in args[1:]):
            return NotImplemented
        return rule(func, args, kwargs)

    return only


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("view reshape view_as reshape_as", (Tensor, torch)), reshape),
    **dict.fromkeys(functions("flatten ravel", (Tensor, torch)), of_a_batch(flatten)),
    **dict.fromkeys(functions("unflatten", (Tensor, torch)), of_a_batch(unflatten)),
    **dict.fromkeys(functions("squeeze", (Tensor, torch)), of_a_batch(squeeze)),
    **dict.fromkeys(functions("unsqueeze", (Tensor, torch)), of_a_batch(unsqueeze)),
    **dict.fromkeys(
        functions("permute transpose t swapaxes swapdims movedim moveaxis adjoint", (Tensor, torch)),
        of_a_batch(permute),
    ),
    **dict.fromkeys(getters("T mT H mH"), of_a_batch(permute)),
    **dict.fromkeys(functions("expand expand_as broadcast_to", (Tensor, torch)), expand),
    **dict.fromkeys(
        functions(
            "chunk split unbind tensor_split split_with_sizes narrow select roll flip",
            (Tensor, torch),
        ),
        of_a_batch(pieces),
    ),
    **dict.fromkeys(functions("repeat_interleave", (Tensor, torch)), of_a_batch(repeat_interleave)),
    **dict.fromkeys(functions("tril triu tril_ triu_", (Tensor, torch)), of_a_batch(of_each_matrix)),
    **dict.fromkeys(functions("pad", (F,)), of_a_batch(pad)),
}
