"""Parameters of which each rank holds a part (`--strategy fsdp`).

A sharded parameter is a batch tensor: it has the shape of the whole, is split along one dimension, and each rank
holds its rows. What a script does with parameters themselves (norms, clipping, an optimizer's step, averages of
weights, saving) follows the rules of batches. A function that computes *with* a parameter gets the whole one: the
parameters of its block are gathered, and released when other blocks need the memory.

In the backward pass a block is gathered again when a function needs a weight that it has saved. Gradients of
unsharded parameters go through `GatherParameters`, which reduce-scatters them (`block.py`).

Why: docs/decisions/0120-sharded-parameters.md
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from duoka.errors import Refused
from duoka.private.torch import (
    TYPES_AGREE,
    TYPES_IN_ONE_CALL,
    make_wrapper,
    memory_of,
    outer_saved_tensors_hooks,
    set_version,
    swap_contents,
    transform_level,
    tree_leaves,
    tree_map_only,
    version_of,
)
from duoka.sharding.block import Block
from duoka.sharding.blocks import Blocks
from duoka.system.user_code import user_line
from duoka.view.dispatch.offloaded import asked_device
from duoka.view.rules.lookup import functions
from duoka.view.shares.layout import laid_out
from duoka.view.shares.strides import Strides
from duoka.view.tensor.batch import (
    SET_DATA,
    Args,
    BatchTensor,
    Function,
    Kwargs,
    batches_in,
    may_write,
    set_rows,
)
from duoka.view.tensor.spec import Spec
from duoka.view.transforms import records_gradients, without_modes


class Sharded(BatchTensor):
    """A parameter of a block. _shard: a batch with its memory, without autograd. _index: in the block."""

    _is_param = True  # for isinstance(..., nn.Parameter)
    _shard: BatchTensor
    _block: Block
    _index: int

    @staticmethod
    def __new__(cls, leaf: BatchTensor) -> Sharded:
        """Make a sharded parameter of `leaf`, a batch whose rows are a leaf and whose `View` is that of parameters.

        The caller adds the new parameter to a `Block`.
        """
        parameter: Sharded = make_wrapper(cls, leaf._meta.shape, dtype=leaf.dtype, device=leaf.device)
        parameter._rows, parameter._meta = leaf._rows, leaf._meta
        parameter._shard = BatchTensor(leaf._rows.detach(), leaf._meta.spec, leaf._meta.strides)
        return parameter

    def __hash__(self) -> int:
        number: int = Tensor.__hash__(self)  # which may be replaced (plain/optimizers.py)
        return number

    def __copy__(self) -> nn.Parameter:  # type: ignore[override]
        return nn.Parameter(self.detach(), self._rows.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        if id(self) not in memo:
            self._block.write_back()
            cloned: Any = self.detach().clone()  # nn.Parameter: no gradient
            rows = cloned._rows.requires_grad_(self._rows.requires_grad)
            memo[id(self)] = copy = Sharded(BatchTensor(rows, self._meta.spec, cloned._meta.strides))
            Block(self._block.blocks, [copy])
        copied: Sharded = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole parameter, as files do not hold the parts of ranks. All ranks must call this."""
        return nn.Parameter(self.full_tensor().detach(), self._rows.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return cls._called(func, types, args, kwargs or {})
        except Refused as refusal:
            batches_in((args, kwargs))[0]._spec.view.raised(refusal)
            raise

    @staticmethod
    def _called(func: Function, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if func == SET_DATA and isinstance(args[0], Sharded):
            return args[0]._set_data(args[1])
        if func is TYPES_AGREE:
            return True
        parameters = [batch for batch in batches_in((args, kwargs)) if isinstance(batch, Sharded)]
        if not parameters:
            return BatchTensor.__torch_function__(func, types, args, kwargs)
        for parameter in parameters:
            parameter._block.write_back()
        blocks = parameters[0]._block.blocks
        if blocks.view.device is None:
            return _call(func, args, kwargs, parameters)
        # Offloaded shards are in the host's memory, but the script must see the device to which it moved the model.
        asked = asked_device(BatchTensor.known(func), args, kwargs)
        out = _call(func, args, kwargs, parameters)
        device = blocks.device_of(parameters[0]._rows) if asked is None else asked
        if isinstance(out, BatchTensor):
            out._shown_device = device
            return out
        return tree_map_only(Tensor, lambda leaf: leaf if isinstance(leaf, BatchTensor) else leaf.to(device), out)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.set_.source_Tensor and isinstance(args[0], Sharded):
            args[0]._set_data(args[1])  # `remove_parametrizations`
            return args[0]
        return BatchTensor.__torch_dispatch__(func, types, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._block.blocks.device_of(self._rows)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._shown())

    def __format__(self, spec: str) -> str:
        return format(self._shown(), spec)

    def _shown(self) -> nn.Parameter:
        values = self._rows.new_empty(self.shape) if self._rows.is_meta else self.full_tensor().detach()
        return nn.Parameter(values, self._rows.requires_grad)

    def duoka_unsharded(self) -> Tensor:
        """Return the whole parameter, to compute with."""
        return self._block.operands([(self._index, None)])[0]

    def _set_data(self, value: Any) -> None:
        """Set `p.data = value`."""
        if not isinstance(value, Tensor):
            torch.empty(0).data = value  # raises torch's error
        self._block.write_back()
        view = self._spec.view
        shown = value._shown_device if isinstance(value, BatchTensor) else value.device
        if shown is not None:
            self._block.blocks.compute_on(shown)
        dim = shard_dimension(value, view.ranks.world_size)
        if dim is None:
            raise Refused(
                f"{user_line()} sets the data of a sharded parameter to a tensor of shape {tuple(value.shape)}, "
                "which is too small to be sharded; do it before the first call of the model"
            )
        spec = Spec(view, view.partition(value.shape[dim]), dim)
        if value.shape != self.shape:
            self._rows.grad = None
        else:
            self._block.blocks.add_unsynced()
            BatchTensor.dispatch(_OF_GRADIENTS[0], (self,), {})  # which stays laid out as the old data
        if isinstance(value, BatchTensor) and replace(value._spec, view=view) == spec:
            self._set_rows(value._local.detach())
            strides = value._meta.strides  # which those of a single row may not tell
        else:
            strides = set_rows(self._set_rows, value.full_tensor() if isinstance(value, BatchTensor) else value, spec)
        leaf = BatchTensor(self._rows, spec, strides)
        _replace_contents(self, leaf)
        self._block.replace(self._index, leaf)

    def _set_rows(self, rows: Tensor) -> Tensor:
        """Set the data of this rank's rows, and return these."""
        if TYPES_AGREE(self._rows, rows):
            self._spec.view.aliased.part_from(self._rows)
            self._rows.data = rows
        else:  # one is on the meta device, or on a vendor's that torch gets from an extension
            self._rows = rows.requires_grad_(self._rows.requires_grad)
        return self._rows


_grad: Any = Tensor.grad
_OF_GRADIENTS = (_grad.__get__, _grad.__set__)
_INITIALISING = frozenset(value for value in vars(nn.init).values() if callable(value))
_IN_16_BITS = frozenset(  # under autocast
    {
        *(F.linear, F.multi_head_attention_forward),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm),
        *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__),
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    }
)
_RESHAPING = frozenset(functions("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_"))
_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_)


def _call(func: Function, args: Args, kwargs: Kwargs, parameters: list[Sharded]) -> Any:
    """Call a function with sharded parameters: by the rules of batches, or with unsharded ones."""
    blocks = parameters[0]._block.blocks
    if BatchTensor.traits_of(func).unrecorded:  # functions of gradients or properties
        blocks.add_unsynced() if func in _OF_GRADIENTS else blocks.add_deferred()
        if func == _OF_GRADIENTS[1] and isinstance(args[1], BatchTensor) and args[1]._spec != args[0]._spec:
            args = args[0], args[1].full_tensor()  # rows of a loader's batch are not divided as parameters are
        known: Any = None
        if func == _OF_GRADIENTS[0]:
            args[0]._block.check_gradient(args[0]._index)
            known = args[0]._gradient
        if known is not None and known[0] is args[0]._rows.grad:
            out = known[1]  # as the rule does: optimizers read it several times for each parameter
        else:
            out = BatchTensor.dispatch(func, args, kwargs)
        if func == _OF_GRADIENTS[0] and isinstance(out, BatchTensor):
            blocks.norms.seen(parameters[0]._rows, out)
        elif func == _OF_GRADIENTS[1]:
            args[0]._block.set_gradient(args[0]._index)
            blocks.norms.forget()
        return out
    if _works_on_shards(func, args, kwargs, parameters):
        blocks.add_deferred()
        with torch.set_grad_enabled(torch.is_grad_enabled() and func not in _INITIALISING):
            return _on_shards(func, args, kwargs)
    return _on_unsharded(func, args, kwargs, parameters)


def _works_on_shards(func: Function, args: Args, kwargs: Kwargs, parameters: list[Sharded]) -> bool:
    """Return True if a function updates or reads parameters, instead of computing a model's output with them."""
    if func in _DETACHING:
        return True
    view = parameters[0]._meta.spec.view
    if any(batch._meta.spec.view is not view for batch in batches_in((args, kwargs))):
        return False
    writes = may_write(func, kwargs)
    first = args[:1] if args else [*kwargs.values()][:1]
    written = [batch for batch in batches_in(first) if isinstance(batch, Sharded)] if writes else []
    if written:
        if torch.is_grad_enabled() and func not in _INITIALISING:
            if any(batch._rows.requires_grad for batch in written):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
                raise Refused(
                    f"{user_line()} writes into a frozen, sharded parameter what needs a gradient, so it would need "
                    "one, too; write under torch.no_grad()"
                )
        if func in _RESHAPING:
            raise Refused(
                f"{user_line()} changes the shape of a sharded parameter in place; set its `data`, or use another "
                "strategy"
            )
        return True
    if torch.is_grad_enabled() and any(parameter._rows.requires_grad for parameter in parameters):
        return False
    return writes or not BatchTensor.traits_of(func).computes


def _on_shards(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function by the rules of batches, with the parameters' shards."""
    parameters: dict[int, Sharded] = {}  # by the identity of their shards

    def shard_of(batch: Any) -> Any:
        if not isinstance(batch, Sharded):
            return batch
        parameters[id(batch._shard)] = batch
        return batch._shard

    args, kwargs = tree_map_only(BatchTensor, shard_of, (args, kwargs))
    view = next(iter(parameters.values()))._meta.spec.view
    with view.gathering_on(view.computes_on):
        out = BatchTensor.dispatch(func, args, kwargs)
    return parameters.get(id(out), out)


def _on_unsharded(func: Function, args: Args, kwargs: Kwargs, parameters: list[Sharded]) -> Any:
    """Call a function with unsharded parameters in place of sharded ones."""
    dtype = _autocast_dtype(func, parameters[0])
    transforms = transform_level() is not None
    with without_modes() if transforms else nullcontext():
        operands = _operands(parameters, dtype)
        if transforms:  # they take no hooks, so what they save must not be memory that is released
            operands = {key: unsharded.clone() for key, unsharded in operands.items()}
    args, kwargs = tree_map_only(Sharded, lambda parameter: operands[id(parameter)], (args, kwargs))
    saves = records_gradients() and not transforms
    # To gather one of several blocks may release another, whose memory `Blocks` then no longer knows.
    used = {memory_of(operands[id(each)]): (each._block, each._index) for each in parameters} if saves else {}
    with saving_positions(parameters[0]._block.blocks, used) if saves else nullcontext():
        out = func(*args, **kwargs)
    for parameter in parameters:
        parameter._block.write_back()
    for parameter in parameters:
        if out is operands[id(parameter)]:  # `p.contiguous()`, `p.float()`
            return parameter
    if saves:
        parameters[0]._block.blocks.views.note(used, out)
    return out


def _autocast_dtype(func: Function, parameter: Sharded) -> torch.dtype | None:
    """Return the dtype to which autocast casts the weights of a function; None if it does not.

    They are cast here, as autocast would keep its copies from the forward to the backward pass.
    """
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if func in _IN_16_BITS and torch.is_autocast_enabled(kind) else None


def _operands(parameters: list[Sharded], autocast: torch.dtype | None) -> dict[int, Tensor]:
    """Return unsharded parameters, by the identity of the sharded ones. autocast: `_autocast_dtype`."""
    members: dict[Block, list[Sharded]] = {}
    for parameter in parameters:
        members.setdefault(parameter._block, []).append(parameter)
    operands: dict[int, Tensor] = {}
    for block, alike in members.items():
        casts = [autocast if each.dtype is torch.float32 and each.dim() >= 2 else None for each in alike]
        tensors = block.operands([(each._index, dtype) for each, dtype in zip(alike, casts, strict=True)])
        operands |= zip(map(id, alike), tensors, strict=True)
    return operands


def shard_dimension(parameter: Tensor, ranks: int) -> int | None:
    """Return the dimension to shard: the first with an entry for each rank; None if there is none."""
    return next((dim for dim, size in enumerate(parameter.shape) if size >= ranks), None)


def shard(parameter: nn.Parameter, blocks: Blocks) -> None:
    """Turn `parameter`, equal on all ranks, into a sharded one; it stays the same object."""
    view = blocks.view
    dim = shard_dimension(parameter, view.ranks.world_size)
    assert dim is not None
    spec = Spec(view, view.partition(parameter.shape[dim]), dim)
    rows, strides = _own_rows(parameter, spec)
    blocks.compute_on(rows.device)
    rows = rows if rows.is_meta else view.replicate(rows)
    set_version(rows, version_of(parameter))
    leaf = BatchTensor(rows.requires_grad_(parameter.requires_grad), spec, strides)
    grad, parameter.grad = parameter.grad, None
    _replace_contents(parameter, leaf)
    Block(blocks, [parameter])
    if grad is not None:
        parameter.grad = grad  # its rows, which share the memory of what the script may hold


def _replace_contents(parameter: Tensor, leaf: BatchTensor) -> None:
    """Let a parameter, which stays the same object, have the rows of `leaf`, and keep the script's attributes."""
    renewed = Sharded(leaf)  # whose size, type and device torch knows
    renewed.__dict__.update({**parameter.__dict__, **renewed.__dict__})
    swap_contents(parameter, renewed)


def shard_like(tensor: Tensor, batch: BatchTensor) -> BatchTensor:
    """Return this rank's rows of a replicated tensor, divided as `batch` is and on the device of its rows."""
    rows, strides = _own_rows(tensor, batch._spec)
    return BatchTensor(rows.to(batch._rows.device), batch._spec, strides)


def _own_rows(tensor: Tensor, spec: Spec) -> tuple[Tensor, Strides]:
    """Return a copy of this rank's rows of a tensor, laid out as it is, and its strides."""
    strides = spec.strides_of(tensor)
    rows = spec.partition.local_rows(tensor.detach(), spec.dim).clone()
    return laid_out(rows, spec.local_strides(strides)), strides


Sharded.__name__ = Sharded.__qualname__ = nn.Parameter.__name__
Sharded.__module__ = nn.Parameter.__module__
TYPES_IN_ONE_CALL += [BatchTensor, Sharded]  # whose norms ranks exchange together


class _Saved(Protocol):
    def tensor(self) -> Tensor: ...


def saving_positions(blocks: Blocks, used: dict[int, tuple[Block, int]]) -> AbstractContextManager[None]:
    """Return a context in which functions save the block and index of parameters in place of their memory.

    used: memory of the parameters among the arguments -> block and index.
    """
    outer = outer_saved_tensors_hooks()

    def pack(tensor: Tensor) -> _Saved:
        memory = memory_of(tensor) if tensor.layout is torch.strided else None
        position = None if memory is None else used.get(memory) or blocks.memory.get(memory)
        if position is not None:
            return _SavedParameter(*position, tensor)
        return _SavedTensor(tensor) if outer is None else _SavedElsewhere(outer[1], outer[0](tensor))

    return saved_tensors_hooks(pack, lambda saved: saved.tensor())


class _SavedParameter:
    __slots__ = ("_block", "_dtype", "_index", "_layout", "_saved_version", "_shard")

    def __init__(self, block: Block, index: int, tensor: Tensor) -> None:
        self._block, self._index, self._dtype = block, index, tensor.dtype
        self._layout, self._shard = (tensor.size(), tensor.stride(), tensor.storage_offset()), block.shards[index]
        self._saved_version = version_of(self._shard._rows)

    def tensor(self) -> Tensor:
        if self._block.shards[self._index] is not self._shard:
            raise Refused(
                f"the backward pass at {user_line()} needs a sharded parameter of shape "
                f"{tuple(self._shard.shape)} as it was before the script set its `data`; set it after the pass"
            )
        _check_version(self._shard._rows, self._saved_version)
        with torch.no_grad():
            return self._block.operands([(self._index, self._dtype)])[0].as_strided(*self._layout)


class _SavedTensor:
    __slots__ = ("_saved_version", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._saved_version = tensor, version_of(tensor)

    def tensor(self) -> Tensor:
        _check_version(self._tensor, self._saved_version)
        return self._tensor


def _check_version(tensor: Tensor, saved: int) -> None:
    """Raise torch's error if a saved tensor was written to: torch does not check tensors with hooks."""
    if version_of(tensor) != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(tensor.shape)} is at version {version_of(tensor)}; expected version {saved} "
            "instead."
        )


class _SavedElsewhere:
    """A tensor that hooks of the script, around the function, have packed."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Function, packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def tensor(self) -> Tensor:
        tensor: Tensor = self._unpack(self._packed)
        return tensor
