"""Activation checkpointing of functions of batches.

torch's `checkpoint` needs plain tensors as inputs and outputs of a function. So it gets a function of the local rows,
which makes batches of them, in the forward pass and when it is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from duoka.private.torch import TreeSpec, tree_flatten, tree_unflatten, uncounted
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs, batches_in, join, rows_by_share
from duoka.view.tensor.spec import Meta
from duoka.view.view import View

_Kinds = list[tuple[Meta, ...]]  # of each leaf: the Meta of each local share; empty for what is no batch


def on_rows(
    view: View, checkpoint: Callable[..., Any], function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Call torch's `checkpoint` on the local rows of the batches among the arguments; results may be batches, too.

    view: averages the gradients of plain tensors among the arguments, before torch detaches them.
    """
    named = {name: value for name, value in kwargs.items() if batches_in(value)}
    others = {name: value for name, value in kwargs.items() if name not in named}
    if view.shares.several:  # no share can be suspended in the mode of selective checkpointing: all is computed again
        others.pop("context_fn", None)
    leaves, tree = tree_flatten((args, named))
    if not view.shares.exact:  # whose shares replicate them
        leaves = [view.replicate(leaf) if type(leaf) in (Tensor, nn.Parameter) else leaf for leaf in leaves]
    rows, kinds = _apart(leaves)
    made: list[tuple[_Kinds, TreeSpec]] = []

    def of_rows(*rows: Any, **others: Any) -> tuple[Any, ...]:
        inputs = _together(rows, kinds)
        for leaf, outside in zip(inputs, leaves, strict=True):
            if type(leaf) is Tensor and leaf is not outside:  # detached from it, with use_reentrant=True
                for sibling in view.siblings:
                    sibling.note_averaged(leaf)
        args, named = tree_unflatten(inputs, tree)
        out, shape = tree_flatten(function(*args, **named, **others))
        if made:  # computed again, with gradients: a module with backward hooks then returns whole tensors
            out = [_placed(leaf, metas, view) for leaf, metas in zip(out, made[0][0], strict=True)]
        rows_out, of = _apart(out)
        made.append((of, shape))
        return tuple(rows_out)

    rows_out = checkpoint(of_rows, *rows, **others)
    of, shape = made[0]
    return tree_unflatten(_together(rows_out, of), shape)


def _apart(leaves: Sequence[Any]) -> tuple[list[Any], _Kinds]:
    """Replace each batch by the rows of the local shares; also return the `_Kinds` that `_together` needs."""
    rows: list[Any] = []
    kinds: _Kinds = []
    for leaf in leaves:
        shares = leaf._shares if isinstance(leaf, BatchTensor) else ()
        rows += rows_by_share(leaf) if shares else [leaf]
        kinds.append(tuple(share._meta for share in shares))
    return rows, kinds


def _placed(leaf: Any, metas: tuple[Meta, ...], view: View) -> Any:
    """Return what was a batch with these `Meta` as a batch again."""
    if not metas or isinstance(leaf, BatchTensor):
        return leaf
    return join(view.shares.each(lambda share: BatchTensor(metas[share].spec.local_rows(leaf), metas[share].spec)))


def _together(rows: Sequence[Any], kinds: _Kinds) -> list[Any]:
    """Make batches of the rows again, and return the leaves that `_apart` was given."""
    pending = iter(rows)
    # These may be leaves for torch, but not for the script, so their gradients must not be divided.
    return [
        join([BatchTensor._made(next(pending), meta) for meta in metas]) if metas else next(pending)
        for metas in kinds
    ]


def computed_again(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `original(module, *args, **kwargs)` so that its activations are computed again in the backward pass.

    The second pass starts with the same buffers as the first (vectors of spectral_norm), and restores their values
    afterwards (statistics of BatchNorm, which torch's kernels change without counting it as a write).
    """
    begin: list[tuple[Tensor, Tensor]] = []

    def compute(*args: Any, **kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        if not begin:
            begin.extend(before)
            return original(module, *args, **kwargs)
        try:
            _restore(begin)
            return original(module, *args, **kwargs)
        finally:
            _restore(before)

    return torch.utils.checkpoint.checkpoint(compute, *args, use_reentrant=False, **kwargs)


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Give buffers these values; most have them already, so it does not count as a write to what autograd saves."""
    with torch.no_grad():
        for buffer, values in buffers:
            with uncounted(buffer):
                buffer.copy_(values)
