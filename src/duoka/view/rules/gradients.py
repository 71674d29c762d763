"""Rules for batches as leaves: adversarial examples, gradient penalties, saliency.

A gradient arrives at a rank's rows world_size times too large (the objective is a sum over ranks' copies of the
loss), so a batch that asks for a gradient divides it on arrival: `x.grad` is then true, and may be written to.

A backward pass is one for all own shares.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from duoka.errors import Refused
from duoka.private.torch import is_view
from duoka.view import originals
from duoka.view.originals import unnumbered
from duoka.view.shares.differentiable import AllReduceSum, with_own_node
from duoka.view.shares.layout import laid_out, laid_out_like
from duoka.view.shares.strides import Strides, contiguous_strides, is_dense, same_layout
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Function,
    Kwargs,
    Rule,
    gather_all,
    join,
    rows_by_share,
    set_rows,
)
from duoka.view.tensor.spec import Meta
from duoka.view.view import View

# Arguments of torch.autograd.backward and torch.autograd.grad, in order.
OF_BACKWARD = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
OF_GRAD = (
    *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    *("only_inputs", "allow_unused", "is_grads_batched", "materialize_grads"),
)


def requires_grad_(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`x.requires_grad_()` and `x.requires_grad = True`."""
    batch = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    batch._local.requires_grad_(wanted)
    if wanted and batch._local.is_leaf:
        batch._spec.view.divide_gradient(batch._local)
    return batch


def get_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return `x.grad`, the same batch until a pass adds to it.

    Rows of a batch that is no leaf (`retain_grad`) keep only what passes have added since it was read last, which
    arrives too large (module docstring) and is divided here.
    """
    batch = args[0]
    shares, known = batch._shares, batch._gradient
    rows = [*map(after_hooks, rows_by_share(batch))]
    grads: list[Any] = [part.grad for part in rows]
    if known is not None and known[0] is grads[0]:
        return known[1]
    batch._gradient = None
    if grads[0] is None:
        return None
    is_leaf, view = rows[0].is_leaf, batch._spec.view
    of_shares: list[Any] = [share._gradient or (None, None) for share in shares]  # known before their data was set
    if is_leaf and all(of[0] is grad for of, grad in zip(of_shares, grads, strict=True)):
        gradient = join([of[1]._shares[0] for of in of_shares])
        _keep_gradient(batch, gradient, is_leaf)
        return gradient
    with torch.set_grad_enabled(grads[0].requires_grad):  # as in the pass
        if not is_leaf:
            grads = [laid_out_like(grad / view.ranks.world_size, grad) for grad in grads]
        gradient = gradient_of([share._meta for share in shares], grads, accumulated=is_leaf)
    for of, part, grad in zip(rows, gradient._shares, grads, strict=True):
        if not is_leaf:
            of.grad = None
        elif part._rows is not grad:  # laid out again: writes to the gradient are to reach it
            of.grad = part._rows
    if not is_leaf and known is not None:
        with torch.set_grad_enabled(gradient.requires_grad):  # as in the pass
            gradient = known[1] + gradient
    _keep_gradient(batch, gradient, is_leaf)
    return gradient


def _keep_gradient(batch: BatchTensor, gradient: BatchTensor, is_leaf: bool) -> None:
    """Keep the batch that `x.grad` returns while the rows have the same gradient; rows that are no leaf have none."""
    if not is_leaf:
        batch._gradient = None, gradient
    else:
        batch._gradient = gradient._shares[0]._rows, gradient
        for share in gradient._shares:
            share._spec.view.aliased.mark_gradient(share._rows)


def gradient_of(metas: Sequence[Meta], parts: Sequence[Tensor], accumulated: bool = False) -> BatchTensor:
    """Make the batch of a gradient from its rows in each local share. metas: of the batch whose gradient it is.

    accumulated: autograd has laid it out as that batch (or contiguous, if the batch has gaps), as it does for `.grad`
    of a leaf. Otherwise the rows show how the whole gradient lies in memory; of ranks with a single row others tell.
    """
    meta, strides = metas[0], None
    if not meta.spec.determines_strides:
        as_batch = meta.strides if is_dense(meta.shape, meta.strides) else contiguous_strides(meta.shape)
        strides = as_batch if accumulated else _agreed_strides(metas, parts, as_batch)
        parts = [laid_out(rows, meta.spec.local_strides(strides)) for meta, rows in zip(metas, parts, strict=True)]
    return join([BatchTensor(rows, meta.spec, strides) for meta, rows in zip(metas, parts, strict=True)])


def _agreed_strides(metas: Sequence[Meta], parts: Sequence[Tensor], as_batch: Strides) -> Strides:
    """Return the strides of a gradient that follow from the rows of a share with several of them (a collective).

    If there is none, those of the batch if a single row may have them, else those that it has, sample by sample.
    """
    meta, rows = max(zip(metas, parts, strict=True), key=lambda share: share[0].spec.local_size)
    size, local = meta.spec.local_size, meta.spec.local_strides(as_batch)
    strides = meta.spec.global_strides(rows, meta.shape)
    if size == 1 and same_layout(rows.shape, rows.stride(), local):
        strides = as_batch
    elif size == 1:  # whose own stride may be any
        dim, own = meta.spec.dim, rows.stride()
        sample = max(length * own[at] for at, length in enumerate(rows.shape) if at != dim)
        strides = (*own[:dim], sample, *own[dim + 1 :])
    mine = torch.tensor([min(size, 2), *strides], device="cpu")
    every = meta.spec.view.shares.processes.all_gather(mine).tolist()
    return tuple(max(every, key=lambda told: told[0])[1:])


def set_grad(func: Function, args: Args, kwargs: Kwargs) -> None:
    """`x.grad = None`, or a batch or whole tensor of the same shape; `del x.grad`."""
    batch, grad = args if len(args) > 1 else (*args, None)
    if not isinstance(batch, BatchTensor):  # a replicated tensor is given a batch as gradient
        batch.grad = grad.full_tensor()
        return
    if grad is not None and getattr(grad, "shape", None) != batch.shape:
        other = torch.empty(grad.shape, device="meta") if isinstance(grad, Tensor) else grad
        batch._meta.of_zeros().grad = other  # raises torch's error
    if isinstance(grad, BatchTensor) and grad._spec != batch._spec:
        grad = grad.full_tensor()
    batch._gradient, gradients = None, []
    for index, rows in enumerate(map(after_hooks, rows_by_share(batch))):
        share = batch._shares[index]
        if grad is None or isinstance(grad, BatchTensor):
            rows.grad = None if grad is None else grad._shares[index]._local
        else:

            def set_on(part: Tensor, of: Tensor = rows) -> Tensor:
                of.grad = part
                return part

            strides = set_rows(set_on, grad, share._spec)
            gradients.append(BatchTensor(rows.grad, share._spec, strides))  # type: ignore[arg-type]
        if not rows.is_leaf:  # torch has checked it
            rows.grad = None
    if grad is not None:
        _keep_gradient(batch, grad if isinstance(grad, BatchTensor) else join(gradients), rows.is_leaf)


def backward(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `y.backward(gradient)` of a batch, each rank for its rows."""
    how = dict(zip(("tensors", "gradient", "retain_graph", "create_graph", "inputs"), args, strict=False)) | kwargs
    how["grad_tensors"] = how.pop("gradient", None)
    backward_of_several(func, (), how)


def backward_of_several(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.backward(tensors, grad_tensors)`."""
    how = dict(zip(OF_BACKWARD, args, strict=False)) | kwargs
    tensors, grad_tensors = listed(how.pop("tensors")), how.pop("grad_tensors", None)
    weights = [None] * len(tensors) if grad_tensors is None else listed(grad_tensors)
    for tensor, weight in zip(tensors, weights, strict=True):
        if isinstance(tensor, BatchTensor) and weight is None and tensor.requires_grad:  # else torch raises its error
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if how.get("inputs") is not None:
        how["inputs"] = inputs_of_pass(how["inputs"])
    torch.autograd.backward(_rows_of_each(tensors), _weights_of_rows(weights, tensors), **how)


def _rows_of_each(tensors: list[Tensor]) -> list[Tensor]:
    """Replace batches by the rows of the local shares."""
    return [part for tensor in tensors for part in rows_by_share(tensor)]


def after_hooks(rows: Tensor) -> Tensor:
    """Return the tensor whose gradient is that of a batch's rows after the batch's hooks (`JointGradient`)."""
    tensor: Tensor = rows if _joint_of(rows) is None else rows.duoka_after_hooks  # type: ignore[attr-defined]
    return tensor


def _weights_of_rows(weights: list[Any], tensors: list[Tensor]) -> list[Any]:
    """Rows count once over all ranks, so their weights are raised by world_size (module docstring)."""
    weighing = []
    for weight, tensor in zip(weights, tensors, strict=True):
        if not isinstance(tensor, BatchTensor):
            weighing.append(weight if weight is None else gather_all(weight).to(tensor.device))
        elif weight is None:
            weighing += [None] * len(tensor._shares)
        else:
            size = tensor._spec.view.ranks.world_size
            weighing += [laid_out_like(rows * size, rows) for rows in rows_of_gradient(weight, tensor)]
    return weighing


def rows_of_gradient(gradient: Tensor, batch: BatchTensor) -> list[Tensor]:
    """Return the rows of a gradient of `batch` for each local share."""
    if gradient.shape != batch.shape:
        of = batch._meta.of_zeros().requires_grad_()
        originals.grad(of, of, torch.empty(gradient.shape, device="meta"))  # raises torch's error
    if isinstance(gradient, BatchTensor):
        if gradient._spec == batch._spec:
            return rows_by_share(gradient)
        gradient = gradient.full_tensor()
    return batch._spec.view.shares.each(lambda index: batch._shares[index]._spec.local_rows(gradient))


def grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.autograd.grad` where outputs or inputs are batches.

    Each row of an output batch is on one rank only, so its `grad_outputs` are multiplied by world_size. Gradients of
    a batch's rows are then divided by world_size, by a hook of the rows or here, and gradients of replicated tensors
    are averaged over the ranks.
    """
    how = dict(zip(OF_GRAD, args, strict=False)) | kwargs
    outputs, inputs = listed(how.pop("outputs")), listed(how.pop("inputs"))
    grad_outputs = how.pop("grad_outputs", None)
    weights = [None] * len(outputs) if grad_outputs is None else listed(grad_outputs)
    view = next(leaf._spec.view for leaf in (*outputs, *inputs) if isinstance(leaf, BatchTensor))
    weighing = _weights_of_rows(weights, outputs)
    for leaf in inputs:
        if isinstance(leaf, BatchTensor):
            _refuse_parted(leaf)
    return whole_gradients(_rows_of_each(outputs), inputs, view, grad_outputs=weighing, **how)


def _refuse_parted(batch: BatchTensor) -> None:
    """Raise Refused for a batch whose gradient would lack that of rows taken of it (`refuse_parted`)."""
    view = batch._spec.view
    if view.aliased.copies:
        rows = rows_by_share(batch)
        view.shares.each(lambda index: view.siblings[index].aliased.refuse_parted(rows[index]))


def whole_gradients(outputs: Any, inputs: list[Tensor], view: View, **how: Any) -> tuple[Tensor | None, ...]:
    """Compute `torch.autograd.grad` of outputs without batches, for inputs that may be batches."""
    of_each = _uses_of_each(inputs)
    flat = [use for parts in of_each for use in parts]
    if how.get("materialize_grads") and how.get("allow_unused") is False:
        originals.grad(outputs, flat, **how)  # raises torch's error
    filled = bool(how.pop("materialize_grads", False))  # after the hooks, which are called for used inputs only
    unused_allowed = filled or bool(how.get("allow_unused"))
    several = view.shares.several  # not every use of an input must be in the graph of the outputs
    unused_raises = several and not unused_allowed
    how["allow_unused"] = several or unused_allowed
    gradients = iter(originals.grad(outputs, flat, **how))
    with torch.set_grad_enabled(bool(how.get("create_graph"))):  # as in the pass
        totals = [
            _true_gradient([next(gradients) for _ in parts], of, view)
            for of, parts in zip(inputs, of_each, strict=True)
        ]
        totals = [
            total if total is None or of not in view.leaf_hooks else call_hooks(view.leaf_hooks[of], total)
            for total, of in zip(totals, inputs, strict=True)
        ]
    unused = [index for index, total in enumerate(totals) if total is None]
    if unused_raises and unused:
        raise RuntimeError(
            f"The differentiated Tensor at index {unused[0]} appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return materialized(totals, inputs, bool(how.get("create_graph"))) if filled else tuple(totals)


def materialized(gradients: Iterable[Tensor | None], inputs: list[Tensor], create_graph: bool) -> tuple[Tensor, ...]:
    """Fill in zeros for inputs that have no gradient, as torch does for `materialize_grads`."""
    return tuple(
        torch.zeros_like(of, requires_grad=create_graph) if gradient is None else gradient
        for gradient, of in zip(gradients, inputs, strict=True)
    )


def uses(of: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients make up that of a tensor: a batch's rows.

    Of an unsharded parameter that a Function was given, they are the rows of the sharded one.
    """
    of = getattr(of, "duoka_parameter", of)
    if isinstance(of, BatchTensor):
        return [*map(after_hooks, rows_by_share(of))]
    return [of]


class Uses(list[Any]):
    """What `inputs_of_pass` returns."""


def inputs_of_pass(inputs: Any) -> Uses:
    """Return `uses` of the inputs of `backward`; plain ones that are no leaves retain their whole gradients."""
    if isinstance(inputs, Uses):
        return inputs
    inputs = listed(inputs)
    for of in inputs:
        if isinstance(of, Tensor) and not isinstance(of, BatchTensor) and of.requires_grad and not of.is_leaf:
            of.retain_grad()  # as torch does
    return Uses(use for of in inputs for use in uses(of))


def _uses_of_each(inputs: list[Tensor]) -> list[list[Tensor]]:
    """Return `uses` of each input of a pass, or a batch's rows before its hooks.

    As torch does: if the pass goes on to another input, it keeps what has arrived, and calls the hooks afterwards.
    """
    of_each = [*map(uses, inputs)]
    for index, (of, parts) in enumerate(zip(inputs, of_each, strict=True)):
        if isinstance(of, BatchTensor) and _joint_of(of._shares[0]._rows) is not None and _leads_to(parts, of_each):
            of_each[index] = rows_by_share(of)
    return of_each


def _leads_to(tensors: list[Tensor], of_each: Sequence[Sequence[Any]]) -> bool:
    """Return True if one of the tensors was computed from what is in `of_each`."""
    inputs = [use for parts in of_each for use in parts if getattr(use, "requires_grad", True)]
    asked = {(use if isinstance(use, GradientEdge) else get_gradient_edge(use)).node for use in inputs}
    seen: set[Any] = {None}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors if not tensor.is_leaf]
    while todo:
        behind = {node for node, _ in todo.pop().next_functions} - seen
        if behind & asked:
            return True
        seen |= behind
        todo += behind
    return False


_asks_for_grad: Any = Tensor.requires_grad
_grad: Any = Tensor.grad


def _true_gradient(received: list[Tensor | None], of: Tensor, view: View) -> Tensor | None:
    """Combine the gradients of `uses` into that of the tensor."""
    shares = view.shares
    if (parameter := getattr(of, "duoka_parameter", None)) is not None:
        sharded = _true_gradient(received, parameter, view)
        return sharded.full_tensor() if isinstance(sharded, BatchTensor) else sharded
    if not isinstance(of, BatchTensor):
        part = received[0]  # with exact it is whole
        if part is not None and part.is_sparse and not shares.exact:  # of an embedding: its rows that are no zeros
            whole = AllReduceSum.apply(shares, part.to_dense()) / shares.world_size
            return cast(Tensor, whole.to_sparse(1).coalesce())
        return part if part is None or shares.exact else AllReduceSum.apply(shares, part) / shares.world_size
    if all(part is None for part in received):
        return None

    def of_share(part: Tensor | None, rows: Tensor) -> Tensor:
        if part is None:
            return torch.zeros_like(rows)
        return part if rows.is_leaf else laid_out_like(part / shares.world_size, part)  # divided on arrival

    rows = [of_share(part, rows) for part, rows in zip(received, rows_by_share(of), strict=True)]
    return gradient_of([share._meta for share in of._shares], rows)


def listed(value: Any) -> list[Any]:
    """Return the outputs or inputs of a pass, of which torch takes one alone, as a list."""
    return [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


def register_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Register a hook that gets, and may return, the gradient of the global batch."""
    batch, hook = args
    _refuse_parted(batch)
    if not batch._spec.view.shares.several or not batch.requires_grad:  # then torch raises
        rows = batch._shares[0]
        return originals.register_hook(rows._local, hook_of_rows(rows, hook))
    joint = _joint_of(batch._shares[0]._local) or JointGradient(batch)
    return joint.register(hook)


def call_hooks(hooks: Mapping[int, Callable[[Tensor], Any]], gradient: Tensor) -> Tensor:
    """Return a gradient as the hooks, called in turn, have changed it."""
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _joint_of(rows: Tensor) -> JointGradient | None:
    """Return what calls the hooks of a batch with these rows; None once they were written in place, as in torch."""
    joint: JointGradient | None = getattr(rows, "duoka_joint", None)
    return None if joint is None or rows.grad_fn is not rows.duoka_node() else joint  # type: ignore[attr-defined]


class JointGradient:
    """Calls hooks of a batch of several shares with the gradient of all of them.

    The rows of the shares get one common node in the graph, which is behind all further uses of the batch.
    """

    def __init__(self, batch: BatchTensor) -> None:
        self._hooks: OrderedDict[int, Callable[[Tensor], Any]] = OrderedDict()
        self._metas = [share._meta for share in batch._shares]
        self._scale = batch._spec.view.ranks.world_size
        self.sent: tuple[Tensor, ...] = ()  # to the rows as they were before
        rows = rows_by_share(batch)
        with unnumbered():
            for index, part in enumerate(rows):
                originals.register_hook(part, partial(self._check, index))
        with torch.inference_mode(False), torch.enable_grad():  # wherever the script registers a hook
            joined = [*map(with_own_node, _Joined.apply(self, *rows))]
        for share, part, before in zip(batch._shares, joined, rows, strict=True):
            part.duoka_joint, part.duoka_after_hooks = self, before
            part.duoka_node = ref(part.grad_fn)
            if before.retains_grad:
                originals.retain_grad(part)  # for `retains_grad`
            share._rows = part
            share.__dict__.pop("_cached", None)

    def register(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Add a hook, to be called after those before."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def call(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the hooks in turn, and return the gradients of the shares' rows."""
        gradient = gradient_of(self._metas, [laid_out_like(grad / self._scale, grad) for grad in grads])
        changed = call_hooks(self._hooks, gradient)
        changed_rows = rows_of_gradient(changed, gradient)
        self.sent = tuple(laid_out_like(rows * self._scale, rows) for rows in changed_rows)
        return self.sent

    def _check(self, index: int, grad: Tensor) -> None:
        if not self.sent or grad.data_ptr() != self.sent[index].data_ptr():
            raise Refused(
                "with --strategy exact, a hook on a batch gets the gradient of what is computed from it later; this "
                "batch was used before, or its function is differentiated twice: register the hook on x * 1"
            )


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: JointGradient, *rows: Tensor) -> Any:
        ctx.joint = joint
        # The same memory. torch refuses writes to what this returns of a view: its base would not have their graph.
        return tuple(part.view_as(part) if is_view(part) else part.detach() for part in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.joint.call(grads)


def hook_of_rows(batch: BatchTensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor | None]:
    """Return the hook for the rows of a batch that calls `hook` with the gradient of the batch."""
    scale = 1 if batch._local.is_leaf else batch._spec.view.ranks.world_size

    def rows_hook(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        out = hook(gradient_of([batch._meta], [laid_out_like(grad / scale, grad)]))
        if out is None:
            return None
        rows = rows_of_gradient(out, batch)[0]
        return laid_out_like(rows * scale, rows)

    return rows_hook


ONCE_FOR_ALL_SHARES: frozenset[Rule] = frozenset(
    {backward, backward_of_several, get_grad, grad, register_hook, set_grad}
)

RULES: dict[Function, Rule] = {
    Tensor.requires_grad_: requires_grad_,
    _asks_for_grad.__set__: requires_grad_,
    _grad.__get__: get_grad,
    _grad.__set__: set_grad,
    _grad.__delete__: set_grad,
    Tensor.backward: backward,
    torch.autograd.backward: backward_of_several,
    Tensor.register_hook: register_hook,
    torch.autograd.grad: grad,
}
