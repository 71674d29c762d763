"""Rules for views, permutations and pieces: the placement of the batch may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.errors import Refused
from duoka.private.torch import swap_contents
from duoka.system.user_code import user_line
from duoka.view.rules.apart import Mixed, apart, dims_from, last, these
from duoka.view.rules.blocks import repeat_interleave, split
from duoka.view.rules.lookup import NotByRows, argument, functions, getters, ndim_of, shape_of, sizes_of
from duoka.view.shares.strides import covers
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule, join, rows_by_share
from duoka.view.tensor.spec import Spec
from duoka.view.whole import compute_whole


def place_after_reshape(shape: tuple[int, ...], spec: Spec, target: list[int]) -> Spec:
    """Return the placement after a reshape of global `shape` to `target`; raise NotByRows if rows are torn apart.

    The samples (n) must stay in one dimension of the target, of size outer * n * inner. The sizes to the left of it,
    multiplied with `outer`, must be the number of elements that precede the samples in `shape`.
    """
    before, n = prod(shape[: spec.dim]) * spec.outer, spec.partition.n
    left = 1
    for dim, size in enumerate(target):
        outer = before // left
        if left * size > before and before % left == 0 and size % (outer * n) == 0:
            return replace(spec, dim=dim, outer=outer, inner=size // (outer * n))
        if before % (left * size) != 0:
            break
        left *= size
    raise NotByRows


def reshape(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """view, reshape, flatten and unflatten, to the shape that torch gives a whole tensor."""
    batch = args[0] if args else None
    if not isinstance(batch, BatchTensor) or batch.numel() == 0:
        return NotImplemented
    dtype = argument(args, kwargs, 1, "dtype")
    if isinstance(dtype, torch.dtype):  # other types have more or fewer numbers in the last dimension
        if dtype.itemsize != batch._rows.itemsize and batch._spec.dim == ndim_of(batch) - 1:
            return NotImplemented
        return BatchTensor(func(batch._local, dtype), batch._spec)
    shape = tuple(batch.shape)
    target = list(func(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape)
    spec = place_after_reshape(shape, batch._spec, target)
    target[spec.dim] = spec.local_size
    return BatchTensor(batch._local.reshape(target), spec)


def as_other(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """view_as, reshape_as and expand_as: only the shape of the other tensor is asked for."""
    return getattr(args[0], func.__name__.partition("_")[0])(shape_of(argument(args, kwargs, 1, "other")))


def squeeze(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """squeeze(): only dimensions of global size 1, whatever the local size is."""
    batch, gone, dim = args[0], _squeezed(args, kwargs), argument(args, kwargs, 1, "dim")
    is_apart = isinstance(dim, int) and dim % batch.dim() != batch._spec.dim  # print(x.squeeze(1)) names the overload
    out = batch._local.squeeze(dim if is_apart else gone)
    return BatchTensor(out, batch._spec.at(batch._spec.dim - sum(d < batch._spec.dim for d in gone)))


def _squeezed(args: Args, kwargs: Kwargs) -> tuple[int, ...]:
    """Return the dimensions that a call of squeeze removes."""
    ndim, shape, dim = args[0].dim(), args[0].shape, argument(args, kwargs, 1, "dim")
    asked = range(ndim) if dim is None else [d % ndim for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
    return tuple(d for d in asked if shape[d] == 1)


def moved(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """permute, unsqueeze and similar: a tensor whose dimensions have different sizes shows where the batch goes."""
    batch, spec = args[0], args[0]._spec
    probe = torch.empty(tuple(range(2, batch.dim() + 2)), device="meta")
    dim = list(func(probe, *args[1:], **kwargs).shape).index(spec.dim + 2)
    return BatchTensor(func(batch._local, *args[1:], **kwargs), spec.at(dim))


def expand(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """expand(sizes) of dimensions other than the batch."""
    batch = args[0]
    if not isinstance(batch, BatchTensor):
        return NotImplemented
    sizes = sizes_of(args, kwargs, "size")
    dim = batch._spec.dim + len(sizes) - batch.dim()
    sizes[dim] = -1
    return BatchTensor(batch._local.expand(sizes), batch._spec.at(dim))


def split_along_others(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """chunk and split; along the batch into whole blocks."""
    batch, dim = args[0], argument(args, kwargs, 2, "dim", 0)
    if func.__name__.startswith("unsafe"):  # torch does not count writes to its results
        batch._spec.view.aliased.has_uncounted_writes = True
    has_tensors = any(isinstance(value, Tensor) for value in args[1:])  # that say where to split
    if isinstance(dim, int) and dim % batch.dim() == batch._spec.dim and not has_tensors:
        return split(batch, func, args, kwargs)
    return _SPLIT(func, args, kwargs)


_SPLIT = apart(dims_from(2, "dim", 0), -1)


def _diagonals(default: tuple[int, int]) -> Mixed:
    """Select the dimensions of diagonal(offset, dim1, dim2)."""

    def mixed(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[Any]:
        return [argument(args, kwargs, 2 + index, f"dim{index + 1}", dim) for index, dim in enumerate(default)]

    return mixed


def _padded(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[Any]:
    """Select the dimensions of pad(sizes), whose pairs begin at the last one."""
    return range(ndim - len(argument(args, kwargs, 1, "pad")) // 2, ndim)


def diag_embed(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """diag_embed(offset, dim1, dim2): the last dimension becomes two."""
    batch, spec, ndim = args[0], args[0]._spec, ndim_of(args[0])
    dims = [argument(args, kwargs, 2 + i, f"dim{i + 1}", i - 2) % (ndim + 1) for i in range(2)]
    if spec.dim == ndim - 1:
        return NotImplemented
    rest = [dim for dim in range(ndim + 1) if dim not in dims]
    return BatchTensor(func(batch._local, *args[1:], **kwargs), spec.at(rest[spec.dim]))


def at_least(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """atleast_1d, atleast_2d and atleast_3d."""
    if len(args) == 1 and isinstance(args[0], BatchTensor):
        return _at_least(args[0], int(func.__name__[-2]))
    tensors = args[0] if len(args) == 1 else args
    return tuple(_at_least(tensor, int(func.__name__[-2])) for tensor in tensors)


def _at_least(tensor: Tensor, dims: int) -> Tensor:
    if ndim_of(tensor) == 0:
        return tensor.view([1] * dims)
    if ndim_of(tensor) == 1 and dims > 1:
        return tensor.unsqueeze(0) if dims == 2 else tensor[None, :, None]
    return tensor.unsqueeze(-1) if ndim_of(tensor) == 2 and dims == 3 else tensor


def stacked(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """hstack, vstack, dstack and column_stack, as cat of tensors with enough dimensions."""
    tensors, name = list(args[0] if args else kwargs["tensors"]), func.__name__
    if name == "hstack":
        tensors = [_at_least(tensor, 1) for tensor in tensors]
        return torch.cat(tensors, 0 if ndim_of(tensors[0]) == 1 else 1)
    if name == "column_stack":
        return torch.cat([t if ndim_of(t) > 1 else t.reshape(-1, 1) for t in tensors], 1)
    dims = 3 if name == "dstack" else 2
    return torch.cat([_at_least(tensor, dims) for tensor in tensors], dims - 1 if dims == 3 else 0)


def split_along(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """hsplit, vsplit and dsplit."""
    batch, how = (*args, *kwargs.values())[:2]
    if not isinstance(batch, BatchTensor):
        return NotImplemented
    dim = {"vsplit": 0, "hsplit": 1 if ndim_of(batch) > 1 else 0, "dsplit": 2}[func.__name__]
    if isinstance(how, int) and shape_of(batch)[dim] % how:
        return NotImplemented  # torch raises the error
    return torch.tensor_split(batch, how, dim)


def broadcast_tensors(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """broadcast_tensors, as expand of each that has another shape."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    shape = torch.broadcast_shapes(*map(shape_of, tensors))
    return tuple(tensor if shape_of(tensor) == shape else tensor.expand(shape) for tensor in tensors)


def in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """squeeze_, unsqueeze_, transpose_ and similar, which change the shape of the batch itself."""
    batch = args[0]
    if not isinstance(batch, BatchTensor):
        return NotImplemented
    with torch.no_grad():
        out = getattr(Tensor, func.__name__.removesuffix("_"))(*args, **kwargs)
    if not isinstance(out, BatchTensor):
        return NotImplemented
    others, named = ((_squeezed(args, kwargs),), {}) if func is Tensor.squeeze_ else (args[1:], kwargs)
    changed = []
    for share, rows, of in zip(batch._shares, rows_by_share(batch), out._shares, strict=True):
        changed.append(BatchTensor(func(rows, *others, **named), of._spec, of._meta.strides))
        for copy in share._spec.view.aliased.of_memory(rows):
            copy.mark_equal()  # torch counts a write, though no value has changed
    swap_contents(batch, join(changed))
    return batch


def as_strided(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.as_strided(size, stride, storage_offset)`, its copy, or `x.as_strided_scatter(src, size, ...)`.

    The result shares memory with a gathered copy, or is computed from one, which has the batch's strides.

    Raises:
        Refused: they reach elements that x has not, as x is itself a view.
    """
    batch, meta, name = args[0], args[0]._meta, func.__name__
    sources = [argument(args, kwargs, 1, "src")] if name == "as_strided_scatter" else []
    first = 1 + len(sources)
    size, stride = list(argument(args, kwargs, first, "size")), tuple(argument(args, kwargs, first + 1, "stride"))
    offset = argument(args, kwargs, first + 2, "storage_offset")
    before = 0 if offset is None else offset - batch.storage_offset()
    if before < 0 or not covers(meta.shape, meta.strides, size, stride, before):
        raise Refused(
            f"{name} at {user_line()} reaches elements outside of the batch that it is called on; call it on the "
            "batch of which that is a view, with the offset in its memory"
        )

    def compute(full: Tensor) -> Any:
        return func(full, *sources, size, stride, full.storage_offset() + before)

    return compute_whole(compute, (batch,), {}, name)


def of_a_batch(rule: Rule) -> Rule:
    """Make a rule that applies if the first argument is a batch and no other is; anything else is computed whole."""

    def only(func: Function, args: Args, kwargs: Kwargs) -> Any:
        if not args or not isinstance(args[0], BatchTensor) or any(isinstance(a, BatchTensor) for a in args[1:]):
            return NotImplemented
        return rule(func, args, kwargs)

    return only


# Their results may be plain tensors whose gradients are sums over all shares.
ONCE_FOR_ALL_SHARES: frozenset[Rule] = frozenset({in_place, as_other, at_least, broadcast_tensors, stacked})

RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("view reshape", (Tensor, torch)), reshape),
    **dict.fromkeys(functions("flatten ravel unflatten", (Tensor, torch)), of_a_batch(reshape)),
    **dict.fromkeys(functions("view_as reshape_as expand_as", (Tensor,)), as_other),
    **dict.fromkeys(functions("squeeze squeeze_copy", (Tensor, torch)), of_a_batch(squeeze)),
    **dict.fromkeys(
        functions(
            "permute transpose t swapaxes swapdims movedim moveaxis adjoint unsqueeze permute_copy transpose_copy "
            "t_copy unsqueeze_copy",
            (Tensor, torch),
        ),
        of_a_batch(moved),
    ),
    **dict.fromkeys(getters("T mT H mH"), of_a_batch(moved)),
    **dict.fromkeys(functions("expand broadcast_to", (Tensor, torch)), expand),
    **dict.fromkeys(
        functions(
            "chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes split_copy "
            "split_with_sizes_copy",
            (Tensor, torch),
        ),
        of_a_batch(split_along_others),
    ),
    **dict.fromkeys(functions("unbind unbind_copy", (Tensor, torch)), apart(dims_from(1, "dim", 0), -1)),
    **dict.fromkeys(functions("narrow select narrow_copy select_copy", (Tensor, torch)), apart(dims_from(1), -1)),
    **dict.fromkeys(functions("repeat_interleave", (Tensor, torch)), of_a_batch(repeat_interleave)),
    **dict.fromkeys(functions("tril_ triu_", (Tensor,)), apart(last(2))),
    **dict.fromkeys(
        functions("as_strided as_strided_copy as_strided_scatter", (Tensor, torch, torch.ops.aten)),
        of_a_batch(as_strided),
    ),
    **dict.fromkeys(functions("pad constant_pad_nd", (F, torch)), apart(_padded)),
    **dict.fromkeys(functions("diagonal diagonal_copy", (Tensor, torch)), apart(_diagonals((0, 1)))),
    torch.view_as_complex: apart(last(1)),
    torch.view_as_real: apart(these()),
    torch.linalg.diagonal: apart(_diagonals((-2, -1))),
    **dict.fromkeys(functions("diag_embed", (Tensor, torch)), of_a_batch(diag_embed)),
    **dict.fromkeys(functions("atleast_1d atleast_2d atleast_3d", (torch,)), at_least),
    **dict.fromkeys(functions("hstack vstack row_stack dstack column_stack", (torch,)), stacked),
    **dict.fromkeys(functions("hsplit vsplit dsplit", (Tensor, torch)), split_along),
    **dict.fromkeys(functions("broadcast_tensors", (torch,)), broadcast_tensors),
    **dict.fromkeys(functions("squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_", (Tensor,)), in_place),
}
