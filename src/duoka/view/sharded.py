"""Parameters of which each rank holds a part (`--strategy fsdp`).

A sharded parameter is a batch tensor: it has the shape of the whole, is split along one dimension, and each rank
holds its rows. What a script does with parameters themselves (norms, clipping, an optimizer's step, averages of
weights, saving) follows the rules of batches. A function that computes *with* a parameter gets the whole one: the
parameters of its block are gathered, and released when other blocks need the memory.

In the backward pass a block is gathered again when a function needs a weight that it has saved. Gradients of whole
parameters go through `GatherParameters`, which reduce-scatters them (`block.py`).

Why: docs/decisions/0120-sharded-parameters.md
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from duoka.devices.vendors import TYPES
from duoka.errors import Refused
from duoka.private.torch import (
    TYPES_AGREE,
    TYPES_IN_ONE_CALL,
    make_wrapper,
    memory_of,
    outer_saved_tensors_hooks,
    swap_contents,
    transform_level,
    tree_map_only,
    version_of,
)
from duoka.view.block import Block
from duoka.view.blocks import Blocks
from duoka.view.dispatch.moving import asked_device
from duoka.view.support.transforms import records_gradients, without_modes
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor, batches_in, may_write
from duoka.view.tensor.spec import Spec

Function = Callable[..., Any]


class Sharded(BatchTensor):
    """A parameter of a block. _part: a batch with its memory, without autograd. _place: index in the block."""

    _is_param = True  # for isinstance(..., nn.Parameter)
    _part: BatchTensor
    _block: Block
    _place: int

    @staticmethod
    def __new__(cls, part: BatchTensor) -> Sharded:
        """Make a sharded parameter of `part`, a batch whose rows are a leaf and whose `View` is that of parameters.

        The caller adds the new parameter to a `Block`.
        """
        made: Sharded = make_wrapper(cls, part._meta.shape, dtype=part.dtype, device=part.device)
        made._hold(part)
        return made

    def _hold(self, part: BatchTensor) -> None:
        self._rows, self._meta = part._rows, part._meta
        self._part = BatchTensor(part._rows.detach(), part._meta.spec)

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        if id(self) not in memo:
            rows = self._rows.detach().clone().requires_grad_(self._rows.requires_grad)  # nn.Parameter: no gradient
            part = BatchTensor(rows, self._meta.spec)
            memo[id(self)] = made = Sharded(part)
            Block(self._block.blocks, [made])
        found: Sharded = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole parameter, as files do not hold the parts of ranks. All ranks must call this."""
        return nn.Parameter(self.full_tensor().detach(), self._rows.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and isinstance(args[0], Sharded):
            return args[0]._set_data(args[1])
        if func is TYPES_AGREE:
            return True
        given = _sharded_in((args, kwargs))
        if not given:
            return BatchTensor.__torch_function__(func, types, args, kwargs)
        for one in given:
            one._block.write_back()
        blocks = given[0]._block.blocks
        if blocks.view.device is None:
            return _call(func, args, kwargs, given)
        asked = asked_device(func, args, kwargs)
        out = _call(func, args, kwargs, given)
        if isinstance(out, BatchTensor):
            out._asked = asked
            return out
        onto = blocks.device_of(given[0]._rows) if asked is None else asked
        return tree_map_only(Tensor, lambda one: one if isinstance(one, BatchTensor) else one.to(onto), out)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._block.blocks.device_of(self._rows)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._shown())

    def __format__(self, spec: str) -> str:
        return format(self._shown(), spec)

    def _shown(self) -> nn.Parameter:
        whole = self._rows.new_empty(self.shape) if self._rows.is_meta else self.full_tensor().detach()
        return nn.Parameter(whole, self._rows.requires_grad)

    def duoka_unsharded(self) -> Tensor:
        """Return the whole parameter, to compute with."""
        return self._block.unsharded(self._place)

    def _set_data(self, value: Tensor) -> None:
        """Set `p.data = value`."""
        view = self._spec.view
        asked = value.__dict__.pop("_asked", None) if isinstance(value, BatchTensor) else value.device
        if asked is not None:
            self._block.blocks.compute_on(asked)
        dim = shard_dimension(value, view.ranks.world_size)
        if dim is None:
            raise Refused(
                f"{user_line()} sets the data of a sharded parameter to a tensor of shape {tuple(value.shape)}, "
                "which is too small to be sharded; do it before the first call of the model"
            )
        spec = Spec(view, view.partition(value.shape[dim]), dim)
        if isinstance(value, BatchTensor) and value._spec == spec:
            rows = value._local.detach()
        else:
            whole = (value.full_tensor() if isinstance(value, BatchTensor) else value).detach()
            rows = view.replicate(spec.partition.local_rows(whole, dim)).clone(memory_format=torch.contiguous_format)
        if value.shape != self.shape:
            self._rows.grad = None
        if self._rows.is_meta == rows.is_meta:
            self._rows.data = rows
        else:  # torch does not give memory to a tensor on the meta device
            self._rows = rows.requires_grad_(self._rows.requires_grad)
        part = BatchTensor(self._rows, spec)
        fresh = Sharded(part)  # whose size, type and device torch knows
        fresh.__dict__.update({**self.__dict__, **fresh.__dict__})
        swap_contents(self, fresh)
        self._block.shards[self._place] = part
        self._block.reshard()


def _is_on(kind: str) -> property:
    return property(lambda self: self.device.type == kind)


for _kind in TYPES:  # the rows of an offloaded parameter are elsewhere
    setattr(Sharded, f"is_{_kind}", _is_on(_kind))


_data: Any = Tensor.data
_SET_DATA = _data.__set__
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
_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_)


def _sharded_in(tree: Any) -> list[Sharded]:
    return [batch for batch in batches_in(tree) if isinstance(batch, Sharded)]


def _call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Sharded]) -> Any:
    """Call a function with sharded parameters: by the rules of batches, or with whole ones."""
    blocks = given[0]._block.blocks
    if BatchTensor.rules.get(func) in BatchTensor.unrecorded:  # functions of gradients or properties
        blocks.add_unsynced() if func in _OF_GRADIENTS else blocks.add_deferred()
        out = BatchTensor.dispatch(func, args, kwargs)
        if func == _OF_GRADIENTS[0] and isinstance(out, BatchTensor):
            blocks.norms.seen(given[0]._rows, out)
        elif func == _OF_GRADIENTS[1]:
            blocks.norms.forget()
        return out
    if _works_on_shards(func, args, kwargs, given):
        blocks.add_deferred()
        with torch.set_grad_enabled(torch.is_grad_enabled() and func not in _INITIALISING):
            return _on_shards(func, args, kwargs)
    return _compute(func, args, kwargs, given)


def _works_on_shards(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Sharded]) -> bool:
    """Return True if a function updates or reads parameters, instead of computing a model's output with them."""
    if func in _DETACHING:
        return True
    view = given[0]._meta.spec.view
    if any(batch._meta.spec.view is not view for batch in batches_in((args, kwargs))):
        return False
    writes = may_write(func, kwargs)
    if writes and isinstance(args[0] if args else next(iter(kwargs.values()), None), Sharded):
        if torch.is_grad_enabled() and given[0]._rows.requires_grad and func not in _INITIALISING:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        return True
    if torch.is_grad_enabled() and any(one._rows.requires_grad for one in given):
        return False
    return writes or BatchTensor.rules.get(func) not in BatchTensor.computing


def _on_shards(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by the rules of batches, with the parameters' rows."""
    whose: dict[int, Sharded] = {}

    def part_of(one: Any) -> Any:
        if not isinstance(one, Sharded):
            return one
        whose[id(one._part)] = one
        return one._part

    args, kwargs = tree_map_only(BatchTensor, part_of, (args, kwargs))
    out = BatchTensor.dispatch(func, args, kwargs)
    return whose.get(id(out), out)


def _compute(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Sharded]) -> Any:
    """Call a function with whole parameters in place of sharded ones."""
    dtype = _autocast_dtype(func, given[0])
    transforms = transform_level() is not None
    with without_modes() if transforms else nullcontext():
        found = {id(one): _operand(one, dtype) for one in given}
        if transforms:  # they take no hooks, so what they save must not be memory that is released
            found = {key: whole.clone() for key, whole in found.items()}
    args, kwargs = tree_map_only(Sharded, lambda one: found[id(one)], (args, kwargs))
    if transforms or not records_gradients():
        out = func(*args, **kwargs)
    else:
        with saved_tensors_hooks(partial(_pack, given[0]._block.blocks, outer_saved_tensors_hooks()), _unpack):
            out = func(*args, **kwargs)
    for one in given:
        one._block.write_back()
    return out


def _autocast_dtype(func: Function, one: Sharded) -> torch.dtype | None:
    """Return the dtype to which autocast casts the weights of a function; None if it does not.

    They are cast here, as autocast would keep its copies from the forward to the backward pass.
    """
    kind = one.device.type
    return torch.get_autocast_dtype(kind) if func in _IN_16_BITS and torch.is_autocast_enabled(kind) else None


def _operand(one: Sharded, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or one.dtype is not torch.float32 or one.dim() < 2:
        return one.duoka_unsharded()
    return one._block.cast(one._place, dtype)


def _pack(blocks: Blocks, outer: tuple[Function, Function] | None, tensor: Tensor) -> Any:
    """Pack a tensor saved for the backward pass; of a whole parameter only its block and index."""
    found = blocks.memory.get(memory_of(tensor)) if tensor.layout is torch.strided else None
    if found is not None:
        block, place = found
        return _SavedParameter(block, place, tensor)
    return _Saved(tensor) if outer is None else _SavedElsewhere(outer[1], outer[0](tensor))


def _unpack(saved: Any) -> Tensor:
    found: Tensor = saved.tensor()
    return found


class _SavedParameter:
    __slots__ = ("_block", "_dtype", "_layout", "_place")

    def __init__(self, block: Block, place: int, tensor: Tensor) -> None:
        self._block, self._place, self._dtype = block, place, tensor.dtype
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        with torch.no_grad():
            return self._block.cast(self._place, self._dtype).as_strided(*self._layout)


class _Saved:
    __slots__ = ("_tensor", "_was")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._was = tensor, version_of(tensor)

    def tensor(self) -> Tensor:
        now = version_of(self._tensor)
        if now != self._was:  # torch does not check tensors with hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)} is at version {now}; expected version {self._was} "
                "instead."
            )
        return self._tensor


class _SavedElsewhere:
    __slots__ = ("_saved", "_unpack")

    def __init__(self, unpack: Function, saved: Any) -> None:
        self._unpack, self._saved = unpack, saved

    def tensor(self) -> Tensor:
        found: Tensor = self._unpack(self._saved)
        return found


def shard_dimension(parameter: Tensor, ranks: int) -> int | None:
    """Return the dimension to shard: the first with an entry for each rank; None if there is none."""
    return next((dim for dim, size in enumerate(parameter.shape) if size >= ranks), None)


def shard(parameter: nn.Parameter, blocks: Blocks) -> None:
    """Turn `parameter`, equal on all ranks, into a sharded one; it stays the same object."""
    view = blocks.view
    dim = shard_dimension(parameter, view.ranks.world_size)
    assert dim is not None
    spec = Spec(view, view.partition(parameter.shape[dim]), dim)
    rows = spec.partition.local_rows(parameter.detach(), dim).clone(memory_format=torch.contiguous_format)
    blocks.compute_on(rows.device)
    rows = rows if rows.is_meta else view.replicate(rows)
    part = BatchTensor(rows.requires_grad_(parameter.requires_grad), spec)
    if parameter.grad is not None:
        own = spec.partition.local_rows(parameter.grad, dim).clone(memory_format=torch.contiguous_format)
        rows.grad = own.to(rows.device)
        parameter.grad = None
    swap_contents(parameter, Sharded(part))
    Block(blocks, [parameter])


def shard_like(whole: Tensor, like: BatchTensor) -> BatchTensor:
    """Return this rank's rows of a whole tensor as `like` holds its own, on their device."""
    spec = like._spec
    rows = spec.local_rows(whole.detach()).to(like._rows.device)
    return BatchTensor(rows.clone(memory_format=torch.contiguous_format), spec)


Sharded.__name__ = Sharded.__qualname__ = nn.Parameter.__name__
Sharded.__module__ = nn.Parameter.__module__
TYPES_IN_ONE_CALL += [BatchTensor, Sharded]  # whose norms ranks exchange together
