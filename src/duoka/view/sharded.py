"""Parameters of which each rank holds a part (`--strategy fsdp`).

A sharded parameter is a batch tensor: it has the shape of the whole, is split along one dimension, and each rank
holds its rows. What a script does with parameters themselves (norms, clipping, an optimizer's step, averages of
weights, saving) follows the rules of batches. A function that computes *with* a parameter gets the whole one: the
parameters of its block are gathered, and released when other blocks need the memory.

In the backward pass a block is gathered again when a function needs a weight that it has saved. Gradients of whole
parameters go through `GatherParameters`, which reduce-scatters them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from duoka.errors import Refused
from duoka.private.torch import (
    TYPES_AGREE,
    make_wrapper,
    memory_of,
    outer_saved_tensors_hooks,
    swap_contents,
    tree_map_only,
    version_of,
)
from duoka.view.shares.differentiable import GatherParameters
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor, Spec, batches_in, may_write
from duoka.view.view import View

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
            part = BatchTensor(copy.deepcopy(self._rows, memo), self._meta.spec)
            if self._rows.grad is not None:
                part._rows.grad = self._rows.grad.clone()
            memo[id(self)] = made = Sharded(part)
            Block(self._block.blocks, [made])
        found: Sharded = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the whole parameter, as files hold no parts."""
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
            one._block.settle()
        if BatchTensor.rules.get(func) in BatchTensor.unrecorded:  # about gradients, or properties
            return BatchTensor.dispatch(func, args, kwargs)
        if _of_parts(func, args, kwargs, given):
            with torch.set_grad_enabled(torch.is_grad_enabled() and func not in _INITIALISING):
                return _with_parts(func, args, kwargs)
        return given[0]._block.blocks.compute(func, args, kwargs, given)

    def gathered(self) -> Tensor:
        """Return the whole parameter, to compute with."""
        return self._block.whole(self._place)

    def _set_data(self, value: Tensor) -> None:
        """Set `p.data = value`."""
        view = self._spec.view
        dim = cut_dimension(value, view.ranks.world_size)
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
            rows = spec.partition.local_rows(whole, dim).clone(memory_format=torch.contiguous_format)
        if value.shape != self.shape:
            self._rows.grad = None
        self._rows.data = rows
        self._hold(BatchTensor(self._rows, spec))
        self._block.parts[self._place] = BatchTensor(self._rows, spec)
        self._block.release()


_data: Any = Tensor.data
_SET_DATA = _data.__set__
_INITIALISING = frozenset(value for value in vars(nn.init).values() if callable(value))
_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_)


def _sharded_in(tree: Any) -> list[Sharded]:
    return [batch for batch in batches_in(tree) if isinstance(batch, Sharded)]


def _of_parts(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Sharded]) -> bool:
    """Return True if a function is about parameters themselves, so that the rules of batches apply."""
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


def _with_parts(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


class Block:
    """Parameters that are gathered together."""

    def __init__(self, blocks: Blocks, members: Sequence[Sharded]) -> None:
        self.blocks = blocks
        self.parts = [BatchTensor(member._rows, member._meta.spec) for member in members]
        self._wholes: list[Tensor] | None = None
        self._written = -1  # `View.written` when they were gathered
        self._tracked: dict[int, Tensor] = {}
        for place, member in enumerate(members):
            if "_block" in member.__dict__:
                member._block.release()
            member._block, member._place = self, place

    @property
    def is_single(self) -> bool:
        """True if it has one parameter."""
        return len(self.parts) == 1

    def size(self) -> int:
        """Return the bytes of the whole parameters."""
        return sum(part._rows.itemsize * part._meta.shape.numel() for part in self.parts)

    def wholes(self) -> list[Tensor]:
        """Return the whole parameters, without gradients; a collective if they are released or were changed."""
        view = self.blocks.view
        self.settle()
        if self._wholes is None or view.written != self._written or view.aliased.copies:
            self.release()
            self.blocks.make_room(self)
            self._wholes, self._written = self._gathered(), view.written
            for place, whole in enumerate(self._wholes):
                self.blocks.memory[memory_of(whole)] = self, place
        self.blocks.use(self)
        return self._wholes

    def whole(self, place: int) -> Tensor:
        """Return a whole parameter, whose gradient, if any, is reduce-scattered to the parts."""
        wholes = self.wholes()
        if not _records() or not self.parts[place]._rows.requires_grad:
            return wholes[place]
        if place not in self._tracked:
            places = [at for at, part in enumerate(self.parts) if part._rows.requires_grad]
            found = GatherParameters.apply(self, places, *(self.parts[at]._rows for at in places))
            self._tracked = dict(zip(places, found, strict=True))
        return self._tracked[place]

    def release(self) -> None:
        """Release the whole parameters, and copy writes to them into the parts."""
        wholes, self._wholes, self._tracked = self._wholes or [], None, {}
        self.blocks.forget(self)
        for part, whole in zip(self.parts, wholes, strict=False):
            self.blocks.memory.pop(memory_of(whole), None)
            if version_of(whole):
                self.blocks.view.written += 1
                with torch.no_grad():
                    part._rows.copy_(part._spec.partition.local_rows(whole, part._spec.dim))

    def settle(self) -> None:
        """Release the whole parameters if they were written to in a way that `may_write` does not show."""
        if any(map(version_of, self._wholes or ())):
            self.release()

    def _gathered(self) -> list[Tensor]:
        if os.getpid() != self.blocks.process:
            raise Refused(
                f"{user_line()} computes with a sharded parameter in a process that the script started, without the "
                "other ranks; do so in the script's own process, or use another strategy"
            )
        with torch.inference_mode(False), torch.no_grad():
            found: dict[int, Tensor] = {}
            for places in self._alike(range(len(self.parts))):
                sent = torch.cat([self.parts[at]._local.reshape(-1) for at in places])
                sizes = [[_shape_on(rank, self.parts[at]).numel() for at in places] for rank in self._ranks]
                most = max(map(sum, sizes))
                if sent.numel() < most:
                    sent = torch.cat([sent, sent.new_zeros(most - sent.numel())])
                came = self.blocks.view.ranks.all_gather(sent)
                apart = [row[: sum(own)].split(own) for row, own in zip(came, sizes, strict=True)]
                for number, at in enumerate(places):
                    part = self.parts[at]
                    rows = [apart[rank][number].view(_shape_on(rank, part)) for rank in self._ranks]
                    found[at] = torch.cat(rows, part._meta.spec.dim)
            return [found[at] for at in range(len(self.parts))]

    @property
    def _ranks(self) -> range:
        return range(self.blocks.view.ranks.world_size)

    def _alike(self, places: Sequence[int]) -> list[list[int]]:
        """Group indices of parameters by dtype and device."""
        kinds: dict[Any, list[int]] = {}
        for at in places:
            rows = self.parts[at]._rows
            kinds.setdefault((rows.dtype, rows.device), []).append(at)
        return list(kinds.values())

    # --- for GatherParameters

    def given(self, places: list[int]) -> tuple[Tensor, ...]:
        """Return whole parameters, for its forward pass."""
        assert self._wholes is not None
        return tuple(self._wholes[at].detach() for at in places)

    def own_gradients(self, places: list[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce-scatter (sum) gradients of whole parameters, for its backward pass."""
        self._tracked = {}
        there = {at: grad for at, grad in zip(places, grads, strict=True) if grad is not None}
        found: dict[int, Tensor] = {}
        for alike in self._alike(list(there)):
            found.update(self._summed({at: there[at] for at in alike}))
        return [found.get(at) for at in places]

    def _summed(self, grads: dict[int, Tensor]) -> dict[int, Tensor]:
        ranks = self.blocks.view.ranks
        if any(grad.layout is not torch.strided for grad in grads.values()):
            raise Refused(
                f"the backward pass at {user_line()} computes a sparse gradient of a sharded parameter; make the "
                "embedding with sparse=False"
            )
        bounds = {at: [self.parts[at]._meta.spec.partition.bounds(rank) for rank in self._ranks] for at in grads}
        if torch.is_grad_enabled():
            return {
                at: self.blocks.total(grad).narrow(self.parts[at]._meta.spec.dim, *_span(bounds[at][ranks.rank]))
                for at, grad in grads.items()
            }
        pieces = [
            torch.cat(
                [
                    grad.narrow(self.parts[at]._meta.spec.dim, *_span(bounds[at][rank])).reshape(-1)
                    for at, grad in grads.items()
                ]
            )
            for rank in self._ranks
        ]
        own = pieces[ranks.rank].numel()
        most = max(piece.numel() for piece in pieces)
        sent = torch.stack(
            [
                piece if piece.numel() == most else torch.cat([piece, piece.new_zeros(most - piece.numel())])
                for piece in pieces
            ]
        )
        total = ranks.start_all_to_all(sent)().sum(0)[:own]
        shapes = [_shape_on(ranks.rank, self.parts[at]) for at in grads]
        parts = total.split([shape.numel() for shape in shapes])
        return {at: part.view(shape) for at, part, shape in zip(grads, parts, shapes, strict=True)}


def _span(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] - bounds[0]


def _shape_on(rank: int, part: BatchTensor) -> torch.Size:
    """Return the shape of a rank's rows."""
    start, stop = part._meta.spec.partition.bounds(rank)
    shape = list(part._rows.shape)
    shape[part._meta.spec.dim] = stop - start
    return torch.Size(shape)


class Blocks:
    """The blocks of a run.

    view: of the sharded parameters. memory: memory of a whole parameter -> its block and index. process: in which
    collectives can be called.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.memory: dict[int, tuple[Block, int]] = {}
        self.process = os.getpid()
        self._here: list[Block] = []  # gathered blocks, the last used one last
        self._largest = 0

    def use(self, block: Block) -> None:
        """Note that a block is used."""
        if self._here and self._here[-1] is block:
            return
        self.forget(block)
        self._here.append(block)

    def forget(self, block: Block) -> None:
        """Note that a block is released."""
        if block in self._here:
            self._here.remove(block)

    def make_room(self, block: Block) -> None:
        """Release blocks, so that together with this one they have at most twice the bytes of the largest."""
        size = block.size()
        self._largest = max(self._largest, size)
        room = 2 * self._largest - size
        while self._here and sum(one.size() for one in self._here) > room:
            self._here[0].release()

    def total(self, grad: Tensor) -> Tensor:
        """All-reduce (sum) a gradient, with gradients of its own."""
        return self.view.replicate(self.view.all_sum(grad))

    def compute(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Sharded]) -> Any:
        """Call a function with whole parameters in place of sharded ones."""
        found = {id(one): one.gathered() for one in given}
        args, kwargs = tree_map_only(Sharded, lambda one: found[id(one)], (args, kwargs))
        if not _records():
            out = func(*args, **kwargs)
        else:
            with saved_tensors_hooks(partial(self._pack, outer_saved_tensors_hooks()), _unpack):
                out = func(*args, **kwargs)
        for one in given:
            one._block.settle()
        return out

    def _pack(self, outer: tuple[Function, Function] | None, tensor: Tensor) -> Any:
        """Pack a tensor saved for the backward pass; of a whole parameter only its block and index."""
        found = self.memory.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        if found is not None and found[0].parts[found[1]].dtype is tensor.dtype:
            block, place = found
            return _SavedParameter(block, place, tensor)
        return _Saved(tensor) if outer is None else _SavedElsewhere(outer[1], outer[0](tensor))


def _records() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _unpack(saved: Any) -> Tensor:
    found: Tensor = saved.tensor()
    return found


class _SavedParameter:
    __slots__ = ("_block", "_layout", "_place")

    def __init__(self, block: Block, place: int, tensor: Tensor) -> None:
        self._block, self._place = block, place
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        return self._block.wholes()[self._place].as_strided(*self._layout)


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


def cut_dimension(parameter: Tensor, ranks: int) -> int | None:
    """Return the dimension to shard: the first with an entry for each rank; None if there is none."""
    return next((dim for dim, size in enumerate(parameter.shape) if size >= ranks), None)


def shard(parameter: nn.Parameter, blocks: Blocks) -> None:
    """Turn `parameter`, equal on all ranks, into a sharded one; it stays the same object."""
    view = blocks.view
    dim = cut_dimension(parameter, view.ranks.world_size)
    assert dim is not None
    spec = Spec(view, view.partition(parameter.shape[dim]), dim)
    rows = spec.partition.local_rows(parameter.detach(), dim).clone(memory_format=torch.contiguous_format)
    part = BatchTensor(rows.requires_grad_(parameter.requires_grad), spec)
    if parameter.grad is not None:
        rows.grad = spec.partition.local_rows(parameter.grad, dim).clone(memory_format=torch.contiguous_format)
        parameter.grad = None
    swap_contents(parameter, Sharded(part))
    Block(blocks, [parameter])  # type: ignore[list-item]


def shard_state(value: Tensor, parameter: Sharded) -> BatchTensor:
    """Shard an optimizer's state of a parameter as the parameter."""
    spec = parameter._spec
    return BatchTensor(
        spec.partition.local_rows(value.detach(), spec.dim).clone(memory_format=torch.contiguous_format), spec
    )


Sharded.__name__ = Sharded.__qualname__ = nn.Parameter.__name__
Sharded.__module__ = nn.Parameter.__module__
