"""What a torch function returns on one device: which results are arguments or views of these, and their strides.

torch's kernels decide it, in nearly all cases those for the device "meta": the call is repeated with whole tensors
without values. The results of a rule are then made to be the same: a copy where one device copies, a view where it
views.

Why: docs/decisions/0130-strides.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from duoka.private.torch import WithoutTorchFunctions, is_view, memory_of, set_version, tree_leaves, tree_map_only
from duoka.view.generators import random_states, set_random_states
from duoka.view.shares.layout import laid_out
from duoka.view.shares.strides import Strides, contiguous_strides, local_distance, overwrite, same_layout
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs, batches_in
from duoka.view.tensor.spec import Spec, zeros
from duoka.view.transforms import without_modes

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Kernels that lay their results out otherwise than those for "meta": in new memory, contiguous, or with channels last
# as their argument; as the query, where its entries are side by side.
_CONTIGUOUS = {F.batch_norm, torch.batch_norm, F.one_hot}
_CONTIGUOUS_ON_CPU = {torch.channel_shuffle, torch.native_channel_shuffle}
_ATTENTION = F.scaled_dot_product_attention
_WITHOUT = ("device", "generator")  # keywords that tensors without values do not take


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a function returns on one device."""

    shape: torch.Size
    strides: Strides
    argument: int | None = None  # the index, among the arguments that are batches, of the one whose memory it has
    same: bool = False  # True if it is this argument itself
    offset: int = 0  # of its first element from that of the argument
    is_view: bool = False  # also of memory that no argument has: `x.T.ravel()` is a view of a copy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returns on one device."""

    results: tuple[Result, ...] | None = None  # each tensor, in order; None if that is not known
    raises: bool = False  # True if the call raises an error there
    lasts: bool = True  # False if the next call of this kind may return other shapes, as `x[:, mask]`


UNKNOWN, RAISES = Outcome(), Outcome(raises=True)


def outcome_of(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Outcome:
    """Return what `func(*args, **kwargs)`, with batches among the arguments, returns on one device.

    Where rows do not tell the strides, as a rank has a single one, kernels of their device are asked, with batches of
    zeros: those for "meta" lay some results out otherwise (`x // 2` of a transposed x).
    """
    outcome = _outcome_on("meta", func, args, kwargs)
    asked = [batch for batch in batches_in((args, kwargs)) if not _tell_strides(batch)]
    devices = {batch.device for batch in asked}
    if len(devices) == 1:
        states = random_states() if BatchTensor.traits_of(func).draws else None
        on_device = _outcome_on(str(*devices), func, args, kwargs)
        if states is not None:
            set_random_states(states)
        if on_device.results is not None:  # else it raises an error because of the zeros
            return replace(on_device, lasts=outcome != UNKNOWN)
    return outcome


def _outcome_on(device: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Outcome:
    wholes: dict[int, Tensor] = {}
    batches: list[Tensor] = []
    without_values = device == "meta"
    copies = without_values and (func in _CONTIGUOUS or (func in _CONTIGUOUS_ON_CPU and _are_on_cpu(args, kwargs)))

    def whole(leaf: Tensor) -> Tensor:
        if func is Tensor.__getitem__ and not isinstance(leaf, BatchTensor) and leaf.dim() == 0:
            return torch.zeros((), dtype=leaf.dtype, device="cpu")  # x[i] is a view of x, wherever it begins
        if id(leaf) not in wholes:
            wholes[id(leaf)] = _whole_like(leaf, device, copies)
            if isinstance(leaf, BatchTensor):
                batches.append(wholes[id(leaf)])
        return wholes[id(leaf)]

    try:
        with WithoutTorchFunctions(), torch.no_grad(), without_modes():
            args, kwargs = tree_map_only(Tensor, whole, (args, kwargs))
            before = [full.shape for full in batches]
            out = func(*args, **{name: value for name, value in kwargs.items() if name not in _WITHOUT})
            query = (args[0] if args else kwargs["query"]) if func is _ATTENTION and without_values else None
            if query is not None and query.shape == out.shape and query.stride(-1) == 1:
                out = torch.empty_like(query)
            if any(full.shape != shape for full, shape in zip(batches, before, strict=True)):
                return UNKNOWN  # it changes its argument's shape
            tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if copies:  # of which "meta" may return a view
                return Outcome(tuple(Result(tensor.shape, tensor.stride()) for tensor in tensors))
            return Outcome(tuple(_result(tensor, batches) for tensor in tensors))
    except NotImplementedError:  # it depends on values, or has no kernel for the device "meta"
        return UNKNOWN
    except Exception as error:
        return UNKNOWN if "meta" in str(error) else RAISES


def _are_on_cpu(args: Args, kwargs: Kwargs) -> bool:
    return all(batch.device.type == "cpu" for batch in batches_in((args, kwargs)))


def _result(tensor: Tensor, batches: list[Tensor]) -> Result:
    for index, full in enumerate(batches):
        if tensor is full or memory_of(tensor) == memory_of(full):
            return Result(tensor.shape, tensor.stride(), index, tensor is full, int(tensor.storage_offset()))
    return Result(tensor.shape, tensor.stride(), is_view=is_view(tensor))


def _whole_like(leaf: Tensor, device: str = "meta", contiguous: bool = False) -> Tensor:
    """Return a tensor in place of another: of a batch one of zeros, else a copy; on "meta" they have no values.

    contiguous: make a batch so, unless it has channels last.
    """
    if isinstance(leaf, BatchTensor):
        full, last = leaf._meta.of_zeros(device), _CHANNELS_LAST.get(len(leaf._meta.shape))
        has_channels_last = last is not None and full.is_contiguous(memory_format=last)
        return full.contiguous() if contiguous and not has_channels_last else full
    like = zeros(leaf.shape, leaf.stride(), leaf.dtype, device)
    if device != "meta":
        overwrite(like, leaf)
    return like


def saves_copies_of(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> list[BatchTensor]:
    """Return the batches among the arguments that autograd does not save on one device, or of which it saves copies.

    `linear` and `matmul` reshape `x.transpose(1, 2)`, for which one device copies. Return none if that is not known.
    """
    wholes: dict[int, tuple[Tensor, Tensor]] = {}  # argument and whole tensor, by the identity of the argument
    saved = set()

    def whole(leaf: Tensor) -> Tensor:
        if id(leaf) not in wholes:
            full = _whole_like(leaf)
            wholes[id(leaf)] = leaf, full.requires_grad_(full.is_floating_point() or full.is_complex())
        return wholes[id(leaf)][1]

    def pack(tensor: Tensor) -> Tensor:
        saved.add(memory_of(tensor))
        return tensor

    try:
        with WithoutTorchFunctions(), torch.inference_mode(False), torch.enable_grad(), without_modes():
            args, kwargs = tree_map_only(Tensor, whole, (args, kwargs))
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                func(*args, **kwargs)
    except Exception:  # no kernel for the device "meta", or an error that the call raises, too
        return []
    batches = ((leaf, full) for leaf, full in wholes.values() if isinstance(leaf, BatchTensor))
    return [batch for batch, full in batches if memory_of(full) not in saved]


def conform(out: Any, batches: Iterable[BatchTensor], outcome: Callable[[], Outcome], views: bool) -> Any:
    """Give the batches in `out`, which a rule has returned, the memory and strides that they have on one device.

    batches: those among the arguments. outcome: returns what the call returns on one device; not called if the rows
    tell it. views: True if the function may return a view.
    """
    inputs = list({id(batch): batch for batch in batches}.values())
    if isinstance(out, BatchTensor):
        if any(out is batch for batch in inputs):
            return out
        if not views and _tell_strides(out) and not _shares_memory(out._rows, inputs):
            return out
        results = outcome().results
        if results == ():  # zeros have no gradient: the rule of `x.grad` tells its strides
            return out
        return _conformed(out, inputs, results[0] if results and len(results) == 1 else None)
    if not isinstance(out, (tuple, list)) or isinstance(out, torch.Size):
        return out
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in leaves if isinstance(leaf, BatchTensor)]
    if not views and not any(not _tell_strides(leaf) or _shares_memory(leaf._rows, inputs) for leaf in made):
        return out
    results = outcome().results
    if results is None or len(results) != len(leaves):
        return out
    new = {
        id(leaf): _conformed(leaf, inputs, result)
        for leaf, result in zip(leaves, results, strict=True)
        if isinstance(leaf, BatchTensor)
    }
    return tree_map_only(BatchTensor, lambda leaf: new[id(leaf)], out)


def _tell_strides(batch: BatchTensor) -> bool:
    """Return True if the rows tell the strides of the batch.

    They do not tell whether a dimension of size 1 has a stride that leads past all samples, or past some of them.
    """
    spec, strides = batch._spec, batch._rows.stride()
    past = strides[spec.dim] * spec.inner * spec.partition.rows
    return spec.determines_strides and not any(
        size == 1 and stride >= past > 0 for size, stride in zip(batch.shape, strides, strict=True)
    )


def _shares_memory(rows: Tensor, batches: list[BatchTensor]) -> bool:
    with WithoutTorchFunctions():  # a recorder need not know
        memory = memory_of(rows)
        return any(memory_of(batch._rows) == memory for batch in batches)


def _conformed(out: BatchTensor, batches: list[BatchTensor], result: Result | None) -> BatchTensor:
    """Return a batch that a rule has returned, as one device would return it. result: what it is there, if known."""
    rows, spec = out._rows, out._spec
    if result is None or result.shape != out.shape:  # as it is, but never the same rows in two batches
        same = [batch for batch in batches if batch._rows is rows]
        if same or spec.determines_strides:
            return same[0] if same else out
        strides = contiguous_strides(out.shape)  # a single row would let each rank guess
        return BatchTensor(_laid_out(rows, spec, spec.local_strides(strides)), spec, strides)
    argument = None if result.argument is None else batches[result.argument]
    if argument is None or argument._rows.device != rows.device:  # a move to another device copies
        shared = _shares_memory(rows, batches)
        strides = _channels_last(rows, spec, result)
        if spec.determines_strides and not (shared or result.is_view):
            known = same_layout(out.shape, strides, out._meta.strides)  # kernels for "meta" may choose another
            return BatchTensor(rows, spec, strides) if known and spec.local_strides(strides) == rows.stride() else out
        local = spec.local_strides(strides)
        rows = _copied(rows, local) if shared else _laid_out(rows, spec, local)
        with WithoutTorchFunctions():  # a recorder need not know
            becomes_view = result.is_view and not is_view(rows)
        return BatchTensor(rows[...] if becomes_view else rows, spec, strides)
    if result.same:
        return argument
    if rows is argument._rows:
        rows = rows[...]
    if not _shares_memory(rows, [argument]):
        rows = _viewed(argument, spec, result)
    # Dimensions of size 1 count, too: torch tells by the strides whether two views are the same elements.
    elif rows.stride() != (strides := spec.local_strides(result.strides)):
        with WithoutTorchFunctions():  # a recorder need not know
            views = is_view(rows)
        rows = rows.as_strided(rows.shape, strides)
        rows = rows if views else rows.detach()  # of detach(), which returns no view
    return BatchTensor(rows, spec, result.strides)


def _channels_last(rows: Tensor, spec: Spec, result: Result) -> Strides:
    """Return the strides of a new batch; with channels last if its rows have them so.

    Kernels for "meta" of convolutions, group_norm, roll and others return contiguous tensors, unlike all devices'.
    """
    last = _CHANNELS_LAST.get(rows.dim()) if spec.dim == 0 else None
    if last is None or result.strides != contiguous_strides(result.shape) or rows.is_contiguous():
        return result.strides
    if not rows.is_contiguous(memory_format=last):
        return result.strides
    return torch.empty(result.shape, device="meta", memory_format=last).stride()


def _copied(rows: Tensor, strides: Strides) -> Tensor:
    """Return a copy with these strides."""
    copy = torch.empty_strided(rows.shape, strides, dtype=rows.dtype, device=rows.device)
    copy.copy_(rows)
    set_version(copy, 0)
    return copy


def _viewed(argument: BatchTensor, spec: Spec, result: Result) -> Tensor:
    """Return the rows of a view of a batch."""
    meta, of = argument._meta, argument._spec
    sample, n, local = meta.strides[of.dim] * of.inner, of.partition.n, max(of.partition.rows, 1)
    offset = local_distance(result.offset, sample, n, local)
    shape = [spec.local_size if dim == spec.dim else size for dim, size in enumerate(result.shape)]
    strides = spec.local_strides(result.strides)

    def view(rows: Tensor) -> Tensor:
        return rows.as_strided(shape, strides, rows.storage_offset() + offset)

    return _as_one_call(view, argument._rows, spec)  # rows of a call that repeats it may begin elsewhere in memory


def _laid_out(rows: Tensor, spec: Spec, strides: Strides) -> Tensor:
    """Return rows with these strides, also of dimensions of size 1: torch tells by them what is the same memory."""
    if rows.stride() == strides:
        return rows
    return _as_one_call(lambda rows: laid_out(rows, strides), rows, spec)  # a recorder does not see all that it calls


def _as_one_call(func: Callable[[Tensor], Tensor], rows: Tensor, spec: Spec) -> Tensor:
    """Call a function, which is recorded as one call."""
    recorder = spec.view.shares.recorder
    out: Tensor = func(rows) if recorder is None else recorder.calling(func, rows)
    return out


_PASSING_ON = ("StraightThroughBackward", "ReadWeightsBackward")  # of results that got other strides; of layers
_NAME = "duoka_name"  # in the metadata of a node: what it is called on one device


class BackwardName:
    """The name of the `grad_fn` that a call has on one device.

    It is found out when a script prints it: the first such call takes ten milliseconds, in which torch loads what
    computes without values.
    """

    def __init__(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        with WithoutTorchFunctions():  # a recorder need not know
            self._call = func, *tree_map_only(Tensor, _whole_like, (args, kwargs))

    def note(self, out: Tensor) -> Tensor:
        """Note it for a result of such a call, and return the result."""
        if out.grad_fn is not None:
            _names(out.grad_fn)[_NAME] = self
        return out

    def __str__(self) -> str:
        func, args, kwargs = self._call
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        with WithoutTorchFunctions(), torch.inference_mode(False), torch.enable_grad():
            try:
                out = func(*tree_map_only(Tensor, _asking, args), **tree_map_only(Tensor, _asking, kwargs))
            except RuntimeError:  # `weight` of a loss may have no gradient
                out = func(_asking(first), *args[1:], **kwargs)
            return type(tree_leaves(out)[0].grad_fn).__name__


def _asking(leaf: Tensor) -> Tensor:
    return torch.empty_like(leaf, requires_grad=leaf.is_floating_point())


def _names(node: Any) -> dict[str, Any]:
    return node.metadata  # type: ignore[no-any-return]  # which torch declares as a method


def note_backward_name(rows: Tensor, full: Tensor) -> None:
    """Note the name of the `grad_fn` of a batch which a call that was computed whole has written to.

    rows: into which the whole tensor was copied; full: what the call has written to.
    """
    if rows.grad_fn is not None and full.grad_fn is not None:
        _names(rows.grad_fn)[_NAME] = type(full.grad_fn).__name__


def backward_name(tensor: Tensor) -> str | None:
    """Return the name of the `grad_fn` that a tensor has on one device; None if it is that of the tensor itself."""
    is_batch = isinstance(tensor, BatchTensor)
    rows = tensor._shares[0]._local if is_batch else tensor  # type: ignore[attr-defined]
    try:
        node, number = rows.grad_fn, rows.output_nr
    except RuntimeError:  # a view of several (`x.unbind()`), whose base was written to
        return "Invalid" if is_batch else None  # as torch shows it
    while node is not None and node.name() in _PASSING_ON:
        node, number = node.next_functions[number]
    if node is None:
        return None
    own, noted = type(node).__name__ if is_batch else None, _names(node).get(_NAME)
    try:
        return own if noted is None else str(noted)
    except Exception:  # the operator does not support the device "meta"
        return own
