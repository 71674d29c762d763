"""Rules for functions of lists of tensors (`torch._foreach_...`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ReduceOp

from duoka.hardware.accelerator import wait_for_copies
from duoka.private.torch import FUSED_STEPS, NORM_OF_ALL, UNSCALE_ALL, functions_of_lists, tree_map_only
from duoka.view.rules.lookup import align, localise, shape_of
from duoka.view.rules.statistics import whole_norms
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, MultiShareBatch, Rule, batches_in


def one_by_one(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `torch._foreach_add(xs, ys)` and similar on this rank's rows, in one call.

    The operands at each index may be batches, or plain tensors that broadcast with them.
    """
    first = args[0]
    if kwargs.keys() - {"alpha", "value", "weight", "scalar"} or not isinstance(first, (list, tuple)):
        return NotImplemented
    listed = [index for index, value in enumerate(args) if isinstance(value, (list, tuple))]
    if any(len(args[index]) != len(first) for index in listed):
        return NotImplemented
    if any(isinstance(value, BatchTensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    writes = func.__name__.endswith("_")
    several = batches_in(args)[0]._spec.view.shares.several
    local: list[list[Any]] = [list(args[index]) for index in listed]
    specs: list[Any] = []
    for at in range(len(first)):
        operands = [values[at] for values in local]
        if several and writes and not _fit(operands):
            return NotImplemented  # it raises after it has written to those before, in all shares
        has_rows = bool(batches_in(operands))
        apart = has_rows or several or _any_needs_gradient([first[at]])
        if writes and apart and not isinstance(first[at], BatchTensor):
            return NotImplemented  # each share would write to it, or to what replicates it
        if several and not has_rows and _any_needs_gradient(operands):
            return NotImplemented  # it would get the gradient of one share
        if not has_rows:
            specs.append(None)
            continue
        common = align(operands)
        specs.append(common[0])
        for values in local:
            values[at] = localise(values[at], *common)
    local_args = list(args)
    for index, values in zip(listed, local, strict=True):
        local_args[index] = values
    out = func(*local_args, **kwargs)
    if out is None:
        return None
    if writes:
        return first
    return tuple(value if spec is None else BatchTensor(value, spec) for value, spec in zip(out, specs, strict=True))


def _fit(operands: list[Any]) -> bool:
    """Return whether the result of an operation has the shape of the first operand, to which it is written."""
    try:
        shapes = [shape_of(operand) for operand in operands if isinstance(operand, Tensor)]
        return bool(torch.broadcast_shapes(*shapes) == shapes[0])
    except RuntimeError:
        return False


def _any_needs_gradient(values: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def unscale(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Unscale gradients for GradScaler; one that is not finite on any rank is reported on all."""
    gradients, found_inf, scale = args
    batches = [gradient for gradient in gradients if isinstance(gradient, BatchTensor)]
    if kwargs or any(isinstance(value, BatchTensor) for value in (found_inf, scale)):
        return NotImplemented
    if any(isinstance(gradient, MultiShareBatch) for gradient in batches):
        return NotImplemented
    rows = [batch._local for batch in batches]
    if plain := [gradient for gradient in gradients if not isinstance(gradient, BatchTensor)]:
        func(plain, found_inf, scale)
    flag = found_inf.to(rows[0].device)  # a copy where these are offloaded
    func(rows, flag, scale.to(rows[0].device))
    batches[0]._spec.view.ranks.all_reduce(flag, ReduceOp.MAX)
    if flag is not found_inf:
        found_inf.copy_(flag)
    return None


def step(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute the step of a fused optimizer, element by element.

    torch does not count what its kernel writes (`Tensor._version`); a gathered copy of a parameter would seem up to
    date. A record would not repeat the counting, so there is none.
    """
    if any(isinstance(value, BatchTensor) for value in (*args, *kwargs.values())):
        return NotImplemented
    listed = [value for value in args if isinstance(value, (list, tuple))]
    for belonging in zip(*(values for values in listed if values), strict=True):
        batches = [value for value in belonging if isinstance(value, BatchTensor)]
        plain = [value for value in belonging if not isinstance(value, BatchTensor) and value.dim()]
        if batches and (plain or not align(batches)):
            return NotImplemented
    batches = batches_in(args)
    if any(isinstance(value, Tensor) and value.is_cpu for value in kwargs.values()):  # GradScaler's
        wait_for_copies(batches[0]._spec.view.computes_on)
    func(*(tree_map_only(BatchTensor, lambda batch: batch._local, value) for value in args), **kwargs)
    increment_version([batch._rows for batch in batches])  # `_local` would take the step for a write to a copy
    recorder = batches[0]._spec.view.shares.recorder
    if recorder is not None:
        recorder.abandon()
    return None


def norms(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`_foreach_norm`: the norm of each tensor; those of all batches are exchanged together."""
    order, dtype = args[1] if len(args) > 1 else kwargs.get("ord", 2), kwargs.get("dtype")
    if kwargs.keys() - {"ord", "dtype"} or len(args) > 2:
        return NotImplemented
    plain = [tensor for tensor in args[0] if not isinstance(tensor, BatchTensor)]
    if batches_in(args)[0]._spec.view.shares.several and _any_needs_gradient(plain):
        return NotImplemented
    together: dict[Any, list[BatchTensor]] = {}
    for tensor in args[0]:
        if isinstance(tensor, BatchTensor):
            together.setdefault((tensor._spec.view, tensor._local.device), []).append(tensor)
    by_identity: dict[int, Tensor] = {}
    for batches in together.values():
        totals = whole_norms(batches, order, dtype)
        if totals is not None and batches[0].device != totals[0].device:  # of offloaded gradients
            totals = [*torch.stack(totals).to(batches[0].device).unbind()]
        by_identity.update({} if totals is None else zip(map(id, batches), totals, strict=True))
    return tuple(
        by_identity[id(tensor)] if id(tensor) in by_identity else torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for tensor in args[0]
    )


ONCE_FOR_ALL_SHARES: frozenset[Rule] = frozenset({unscale})  # which writes to tensors that have no copies

RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions_of_lists("max norm"), one_by_one),
    NORM_OF_ALL: norms,
    UNSCALE_ALL: unscale,
    **dict.fromkeys(FUSED_STEPS, step),
}
