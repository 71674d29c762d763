"""A block: sharded parameters that are unsharded together, and whose gradients are reduce-scattered together.

`divide` and `groups` choose the parameters of each block of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import unwrap
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from duoka.errors import Refused
from duoka.private.torch import (
    NO_PASS,
    backward_number,
    count_hooks,
    gradient_is_accumulated,
    memory_of,
    run_first,
    set_version,
    uncounted,
    version_of,
)
from duoka.sharding.pack import Arriving, Kind, Pack
from duoka.system.user_code import is_called_by, user_line
from duoka.view.memory import history
from duoka.view.shares.differentiable import GatherParameters
from duoka.view.shares.layout import laid_out
from duoka.view.shares.strides import is_dense, overwrite
from duoka.view.tensor.batch import BatchTensor
from duoka.view.transforms import records_gradients

if TYPE_CHECKING:
    from duoka.sharding.blocks import Blocks, PrefetchTarget


_ZEROING = tuple(unwrap(function).__code__ for function in (nn.Module.zero_grad, Optimizer.zero_grad))


class Block:
    """Parameters that are unsharded together. parameters: sharded ones (`parameter.py`), whose block this becomes."""

    def __init__(self, blocks: Blocks, parameters: Sequence[Any]) -> None:
        self.blocks = blocks
        self.shards = [BatchTensor(each._rows, each._meta.spec, each._meta.strides) for each in parameters]
        # Block used before this one -> the block that was used after this one then.
        self.prefetch_targets: WeakKeyDictionary[Block, PrefetchTarget] = WeakKeyDictionary()
        self._packs: dict[Any, list[Pack]] = {}  # by where they are unsharded, and their indices
        self._unsharded: list[Tensor] | None = None
        self._versions: list[int] = []  # of these when they were gathered
        self._written = -1  # `View.written` when they were gathered
        self._pass = NO_PASS  # the backward pass in which they were gathered
        self._tracked: dict[int, Tensor] = {}  # unsharded parameters in the graph of gradients, by index
        self._nodes: dict[int, Any] = {}  # the nodes of these in the graph, which a recorded write replaces
        self._arrived: list[int] = []  # indices of those whose gradient the pass has computed, in order
        self._cast: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # by index, dtype and whether it is tracked
        self._parameters = [ref(parameter) for parameter in parameters]
        self._failures = [blocks.failures] * len(parameters)  # until which each gradient is complete
        for index, parameter in enumerate(parameters):
            if "_block" in parameter.__dict__:
                parameter._block.reshard()
            parameter._block, parameter._index = self, index

    @property
    def is_single(self) -> bool:
        """True if it has one parameter."""
        return len(self.shards) == 1

    @property
    def is_unsharded(self) -> bool:
        """True if its unsharded parameters are gathered and up to date.

        Copies that the script holds may change without notice, but not in a backward pass. In it ranks ask as often
        as there are steps in their own sequences.
        """
        view = self.blocks.view
        in_this_pass = self._pass == backward_number() != NO_PASS
        return self._unsharded is not None and view.written == self._written and (in_this_pass or not self.has_copies)

    @property
    def is_gathered(self) -> bool:
        """True if its unsharded parameters are in memory."""
        return self._unsharded is not None

    @property
    def has_copies(self) -> bool:
        """True if the script may hold copies of its parameters. All ranks that use the block get the same answer.

        Copies of other parameters may be garbage, which some ranks have collected and others not.
        """
        aliased = self.blocks.view.aliased
        return bool(aliased.copies) and any(aliased.of_memory(shard._rows) for shard in self.shards)

    def size(self) -> int:
        """Return the bytes of the unsharded parameters."""
        return sum(shard._rows.itemsize * shard._meta.shape.numel() for shard in self.shards)

    def replace(self, index: int, shard: BatchTensor) -> None:
        """Replace this rank's rows of a parameter."""
        self.shards[index] = shard
        self._packs.clear()
        self.reshard()
        self.blocks.views.part(self, index)

    # --- parameters

    def unshard(self) -> list[Tensor]:
        """Return the unsharded parameters, without gradients; all-gather them if necessary."""
        self.write_back()
        if not self.is_unsharded:
            unsharded, take = self.blocks.gather(self), self.blocks.views.take
            self._unsharded = unsharded = [take(self, index, tensor) for index, tensor in enumerate(unsharded)]
            self._versions = [version_of(shard._rows) for shard in self.shards]
            self._written, self._pass = self.blocks.view.written, backward_number()
            for index, (tensor, version) in enumerate(zip(unsharded, self._versions, strict=True)):
                self.blocks.memory[memory_of(tensor)] = self, index
                set_version(tensor, version)  # which the script reads of a view
        self.blocks.use(self)
        assert self._unsharded is not None
        return self._unsharded

    def operands(self, wanted: Sequence[tuple[int, torch.dtype | None]]) -> list[Tensor]:
        """Return unsharded parameters, whose gradients, if any, are reduce-scattered to the shards.

        wanted: their indices, and the dtypes to which they are cast; None: their own. A copy in another dtype is
        freed with the block. What one function needs is asked for at once: as long as the script holds a copy of a
        parameter, the block is gathered at each call of this method, and frees what it gathered before.
        """
        tensors = self.unshard()
        return [self._cast_to(self._operand(tensors, index), index, dtype) for index, dtype in wanted]

    def _operand(self, tensors: list[Tensor], index: int) -> Tensor:
        if not records_gradients() or not self.shards[index]._rows.requires_grad:
            return tensors[index]
        if index not in self._tracked:
            # One node for all, so that their gradients come together
            trained = [number for number, shard in enumerate(self.shards) if shard._rows.requires_grad]
            tracked = GatherParameters.apply(self, trained, *(self.shards[number]._rows for number in trained))
            self._tracked = dict(zip(trained, tracked, strict=True))
            if self.blocks.notes_order:
                self._tracked = {number: self._noting(number, tensor) for number, tensor in self._tracked.items()}
            self._nodes = {number: history(tensor) for number, tensor in self._tracked.items()}
        return self._tracked[index]

    def _noting(self, index: int, tensor: Tensor) -> Tensor:
        """Return the same memory, whose node notes when a pass has computed the gradient, as on one device."""
        noting = tensor.view_as(tensor)
        node: Any = noting.grad_fn
        run_first(node, 0)
        node.register_prehook(partial(_note, self._arrived, index))
        return noting

    def _cast_to(self, tensor: Tensor, index: int, dtype: torch.dtype | None) -> Tensor:
        if dtype is None or tensor.dtype is dtype:
            return tensor
        key = index, dtype, tensor.requires_grad
        if key not in self._cast and (index, dtype, True) in self._cast:
            return self._cast[index, dtype, True]
        if key not in self._cast:
            with torch.inference_mode(False):
                self._cast[key] = tensor.to(dtype)
            self.blocks.memory[memory_of(self._cast[key])] = self, index
        return self._cast[key]

    def untrack(self) -> None:
        """Drop the graph node of the unsharded parameters: their next use makes a new one."""
        self._tracked, self._nodes = {}, {}
        for key in [key for key in self._cast if key[2]]:
            self.blocks.memory.pop(memory_of(self._cast.pop(key)), None)

    def reshard(self) -> None:
        """Free the unsharded parameters, and copy writes to them into the shards."""
        unsharded, self._unsharded = self._unsharded or [], None
        versions, self._versions = self._versions, []
        self.untrack()
        for cast in self._cast.values():
            self.blocks.memory.pop(memory_of(cast), None)
        self._cast = {}
        self.blocks.forget(self)
        for index, (tensor, version) in enumerate(zip(unsharded, versions, strict=True)):
            self.blocks.memory.pop(memory_of(tensor), None)
            self.copy_to_shard(index, tensor, version_of(tensor) - version)
            self.blocks.views.keep(self, index, tensor)

    def copy_to_shard(self, index: int, unsharded: Tensor, writes: int) -> None:
        """Copy writes to an unsharded parameter, if there were any, into this rank's shard."""
        if writes == 0:
            return
        view, shard = self.blocks.view, self.shards[index]
        view.written += 1
        with torch.no_grad(), view.aliased.updated([shard._rows], None):
            number = version_of(shard._rows) + writes
            shard._rows.copy_(shard._spec.partition.local_rows(unsharded, shard._spec.dim))
            set_version(shard._rows, number)

    def write_back(self) -> None:
        """Copy writes to unsharded parameters that `may_write` does not detect into the shards.

        Raises:
            RuntimeError: autograd has recorded one, which torch refuses for a view of a leaf.
        """
        if [*map(version_of, self._unsharded or ())] != self._versions:
            self._undo_recorded_writes()
            self.reshard()
        self.blocks.views.write_back()

    def _undo_recorded_writes(self) -> None:
        """Gather parameters again into memory to which autograd has recorded a write (a collective), and raise."""
        recorded = [index for index, node in self._nodes.items() if history(self._tracked[index]) is not node]
        for index in recorded:
            assert self._unsharded is not None
            unsharded = self._unsharded[index]
            with torch.no_grad(), uncounted(unsharded):
                overwrite(unsharded, self.shards[index].full_tensor())
            set_version(unsharded, self._versions[index])
        if recorded:
            self.untrack()
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation "
                f"(noticed at {user_line()})."
            )

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of tensors that a rank sends to gather the block."""
        return tuple(pack.kind for pack in self._packs_of(range(len(self.shards))))

    def start_all_gather(self) -> Callable[[], list[Tensor]]:
        """Start to gather the parameters; the returned function waits for them."""
        waits = [pack.start_all_gather(self.blocks.uploads) for pack in self._packs_of(range(len(self.shards)))]

        def finish() -> list[Tensor]:
            gathered: dict[int, Tensor] = {}
            for wait in waits:
                gathered |= wait()
            return [gathered[index] for index in range(len(self.shards))]

        return finish

    def _packs_of(self, indices: Sequence[int]) -> list[Pack]:
        """Return what is sent of these parameters: a pack for each dtype and device."""
        key = self.blocks.view.computes_on, tuple(indices)
        if key not in self._packs:
            kinds: dict[Any, list[int]] = {}
            for index in indices:
                rows = self.shards[index]._rows
                kinds.setdefault((rows.dtype, rows.device), []).append(index)
            self._packs[key] = [
                Pack(
                    alike,
                    [self.shards[index] for index in alike],
                    self.blocks.device_of(self.shards[alike[0]]._rows),
                    self.blocks.view.ranks,
                )
                for alike in kinds.values()
            ]
        return self._packs[key]

    # --- gradients, for GatherParameters

    def unsharded_for_forward(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return unsharded parameters, for the forward pass of `GatherParameters`."""
        assert self._unsharded is not None
        return tuple(self._unsharded[index].detach() for index in indices)

    def reduce_scatter_gradients(self, indices: list[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce-scatter (sum) gradients of unsharded parameters, for the backward pass of `GatherParameters`.

        Returns None for those that are added to `.grad` at the end of the pass.
        """
        self.untrack()
        self.blocks.norms.forget()
        reached = {index: grad for index, grad in zip(indices, grads, strict=True) if grad is not None}
        if any(grad.layout is not torch.strided for grad in reached.values()):
            raise Refused(
                f"the backward pass at {user_line()} computes a sparse gradient of a sharded parameter; make the "
                "embedding with sparse=False"
            )
        arrived, self._arrived[:] = [index for index in self._arrived if index in reached], []
        for place, index in enumerate(dict.fromkeys([*arrived, *reached])):
            if (parameter := self._parameters[index]()) is not None:
                self.blocks.on_gradient(parameter)
            rows = self.shards[index]._rows
            if arrived and rows.requires_grad:  # let autograd call the hooks on the shards in this order
                run_first(get_gradient_edge(rows).node, place)
        if torch.is_grad_enabled():  # with create_graph
            return [self._total(index, reached[index]) if index in reached else None for index in indices]
        self.reshard()  # the backward pass has left it
        only_added = self.blocks.defers and all(map(self._is_only_added, indices))
        if only_added and self.blocks.hold_unsynced(self, reached):
            return [None] * len(indices)
        waits = self.start_reduce_scatter(reached)
        if only_added:
            self.blocks.defer(self, waits)
            return [None] * len(indices)
        sums: dict[int, Tensor] = {}
        for wait in waits:
            sums |= wait()()
        return [sums.get(index) for index in indices]

    def start_reduce_scatter(self, grads: dict[int, Tensor]) -> list[Callable[[], Arriving]]:
        """Start to reduce-scatter (sum) gradients of unsharded parameters, and clear `grads`; the functions wait."""
        replicas = self.blocks.replicas
        return [
            pack.start_reduce_scatter(
                [grads.pop(index) for index in pack.indices],
                None if replicas is None else replicas.ranks,
                self.blocks.downloads,
            )
            for pack in self._packs_of(list(grads))
        ]

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add the sum over ranks of a gradient to `.grad`, as autograd does."""
        self.blocks.norms.forget()
        rows = self.shards[index]._rows
        grad = grad / self.blocks.view.ranks.world_size  # as the hook of `View.divide_gradient` does
        if rows.grad is None:
            rows.grad = laid_out(grad, rows.stride()) if is_dense(rows.shape, rows.stride()) else grad
        else:
            rows.grad += grad

    def check_gradient(self, index: int) -> None:
        """Check that a gradient, which the script reads, has what all passes have added.

        A pass that fails has added the gradients of some parameters on one device. Here those of a block come
        together, after more of the pass.

        Raises:
            Refused: a pass has failed since the gradient was last set or zeroed.
        """
        rows = self.shards[index]._rows
        if self._failures[index] != self.blocks.failures and (rows.requires_grad or rows.grad is not None):
            if not is_called_by(_ZEROING):
                raise Refused(
                    f"{user_line()} reads a gradient to which a backward pass that failed has added an unknown part; "
                    "call zero_grad() after the error, or use another strategy"
                )
            self.set_gradient(index)

    def set_gradient(self, index: int) -> None:
        """Note that the script has set a gradient, or zeroes it."""
        self._failures[index] = self.blocks.failures

    def _is_only_added(self, index: int) -> bool:
        """Return True if nothing but the addition to `.grad` happens to a shard's gradient in this pass."""
        rows = self.shards[index]._rows
        return count_hooks(rows) == 1 and gradient_is_accumulated(rows)

    def _total(self, index: int, grad: Tensor) -> Tensor:
        """All-reduce (sum) a gradient, differentiably, and return this rank's rows."""
        view, spec, replicas = self.blocks.view, self.shards[index]._meta.spec, self.blocks.replicas
        total = view.all_sum(grad)
        if replicas is not None:
            total = replicas.all_sum(total) / replicas.ranks.world_size
        start, stop = spec.partition.bounds(view.ranks.rank)
        return view.replicate(total).narrow(spec.dim, start, stop - start).to(self.shards[index]._rows.device)


def _note(arrived: list[int], index: int, _: Any) -> None:
    arrived.append(index)


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LARGE = 4  # parameters in no part form a block each if larger than this part of the largest block


def groups(module: nn.Module, parts: list[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each block: those of each of `parts`, each large one of the others, and the rest.

    Those of a recurrent layer count as one.
    """
    if any(map(is_lazy, module.parameters())) or any(
        isinstance(part, torch.jit.ScriptModule) for part in module.modules()
    ):
        return
    sparse = (part for part in module.modules() if getattr(part, "sparse", False) is True)
    seen = {id(parameter) for part in sparse for parameter in part.parameters()}
    sizes = [0]
    for part in parts:
        parameters = [parameter for parameter in part.parameters() if id(parameter) not in seen]
        seen.update(map(id, parameters))
        sizes.append(sum(parameter.numel() for parameter in parameters))
        yield parameters
    rest = []
    for part in module.modules():
        parameters = list(nn.Module.parameters(part, recurse=False))
        # A backward pass reads the weights of a recurrent layer as often as a rank's sequences have steps: together
        for together in [parameters] if isinstance(part, nn.RNNBase) else [[parameter] for parameter in parameters]:
            unit = [parameter for parameter in together if id(parameter) not in seen]
            seen.update(map(id, unit))
            if sum(parameter.numel() for parameter in unit) * _LARGE > max(sizes) > 0:
                yield unit
            else:
                rest += unit
    yield rest


def divide(module: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the parts of a model whose parameters are gathered together.

    They are the outermost parts of the classes in `names`; without names, the entries of the model's lists
    (ModuleList, ModuleDict, Sequential, and such within these). Parts without parameters, and those used elsewhere,
    too, are left out.
    """
    users = Counter(_parameters(module))
    registered = Counter(part for _, part in module.named_modules(remove_duplicate=False))

    def stands_alone(entry: nn.Module) -> bool:
        parameters = Counter(_parameters(entry))
        once = all(registered[part] == 1 for part in entry.modules())
        return bool(parameters) and once and all(users[key] == count for key, count in parameters.items())

    return [entry for entry in (_named(module, names) if names else _entries(module)) if stands_alone(entry)]


def _named(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the outermost submodules whose class name is in `names`."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _named(child, names)


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists."""
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _entries(child)


def _parameters(module: nn.Module) -> Iterator[int]:
    """Yield the id of each parameter of each part; tied ones several times."""
    return (id(parameter) for part in module.modules() for parameter in nn.Module.parameters(part, recurse=False))
