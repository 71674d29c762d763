"""Each rank holds a part of the parameters, of their gradients and of the optimizer's state.

A parameter stays the same object, and becomes a batch tensor (`duoka.sharding`): the parameters of a block are
gathered around functions that compute with one of them. Parameters that cannot be sharded (fewer entries than ranks,
memory shared with other tensors) stay replicated, as with ddp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from duoka.collectives.base import Collectives
from duoka.collectives.process import PartCollectives, ProcessCollectives
from duoka.errors import Refused
from duoka.hardware.accelerator import best, memory_of
from duoka.planning.options import RunSettings
from duoka.private.torch import (
    GROUP_ALIKE,
    SINGLE_STEPS,
    count_references,
    count_users,
    hooks_of,
    set_hooks,
    version_of,
)
from duoka.sharding.block import Block, divide, groups
from duoka.sharding.blocks import Blocks
from duoka.sharding.gradient_norms import GradientNorms
from duoka.sharding.parameter import Sharded, saving_positions, shard, shard_dimension, shard_like
from duoka.sharding.updates import update_rows
from duoka.strategies.buckets import WholeHook
from duoka.strategies.compress import Compression
from duoka.strategies.ddp import Ddp
from duoka.system import libc
from duoka.system.user_code import user_line
from duoka.view.rules.gradients import hook_of_rows
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import ParameterView, View

_SHOWN = 12  # classes


class ModelSharding:
    """The sharded models of one run.

    adopt: as for `View`. leave: called with each parameter that becomes sharded. reach: called with each one that a
    backward pass reaches. say: prints a line. names: classes of the modules that are blocks; empty: found in lists.
    every: whether every model of the run is sharded. machines: the ranks of each machine, all of which hold a copy of
    the model; empty: all ranks together hold one. offloads: shards, gradients and the optimizer's state stay in the
    host's memory; blocks are gathered on the device to which the model was moved.
    """

    def __init__(
        self,
        ranks: Collectives,
        adopt: Callable[[Tensor], None],
        leave: Callable[[Tensor], None],
        reach: Callable[[Tensor], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        names: Sequence[str] = (),
        every: bool = False,
        machines: Sequence[Sequence[int]] = (),
        offloads: bool = False,
    ) -> None:
        self._ranks, self._leave, self._say, self._names, self._every = ranks, leave, say, names, every
        among, replicas = _groups_of_ranks(ranks, machines)
        self._count, self._offloads = among.world_size, offloads
        self.blocks: WeakSet[nn.Module] = WeakSet()  # found in the models so far
        self.view = ParameterView(among, adopt, GradientNorms(), torch.device("cpu") if offloads else None)
        self._blocks = Blocks(self.view, reach, replicas)
        self._sharded_count = 0  # parameters so far
        self._flattened = WeakIdKeyDictionary()  # parameters of LBFGS
        self._early = WeakIdKeyDictionary()  # parameters on the meta device that an optimizer was given
        self._hook: Any = register_optimizer_step_pre_hook(self._before_step) if every else None

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of `module` with rank 0's values.

        Parameters that are sharded already stay so; those of a copied model are grouped into blocks.
        """
        self._hook = self._hook or register_optimizer_step_pre_hook(self._before_step)
        before, parts = self._sharded_count, divide(module, self._names)
        # A part of a block is called by itself when the block is computed again: it is no block of its own then.
        inside = {part for block in self.blocks for part in block.modules()}
        self.blocks.update(part for part in parts if part not in inside)
        with torch.inference_mode(False):  # what is made in a first call in inference mode could not be trained
            divided = [*groups(module, parts)]
            possible = self._possible([parameter for group in divided for parameter in group])
            for group in divided:
                members = [each for each in group if self._shard_parameter(each, id(each) in possible)]
                if len(members) > 1:
                    Block(self._blocks, members)
        if self._sharded_count > before:
            libc.return_freed_memory()  # of the whole model, whose holes are too small for whole tensors of a file
            _check_room(module)
            self._say(_description(module, self._count, self._every, self._offloads))
            self._name_missing(module)
            return
        parameters = list(module.parameters())
        if parameters and not any(isinstance(parameter, Sharded) or is_lazy(parameter) for parameter in parameters):
            self._say(
                f"strategy fsdp: {type(module).__name__} stays whole on every rank, as its parameters have fewer "
                "entries than there are ranks or sparse gradients, or something else shares their memory, or they "
                "are no nn.Parameter"
            )

    def _name_missing(self, module: nn.Module) -> None:
        """Name the classes of `--blocks` that a model has none of; with several models, others may have them."""
        classes = dict.fromkeys(type(part).__name__ for part in module.modules())
        missing = [name for name in self._names if name not in classes]
        if missing:
            known = ", ".join([*classes][:_SHOWN]) + (", ..." if len(classes) > _SHOWN else "")
            self._say(f"--blocks: {type(module).__name__} has no {', '.join(missing)}; its classes are {known}")

    def _possible(self, parameters: list[nn.Parameter]) -> set[int]:
        """Return the identities of those that every rank can shard: garbage on one may refer to their memory."""
        pending = [parameter for parameter in parameters if not isinstance(parameter, Sharded)]
        if not pending:
            return set()
        votes = [int(_can_be_sharded(parameter, self._count)) for parameter in pending]
        answers = self._ranks.all_reduce(torch.tensor(votes, device="cpu"), ReduceOp.MIN).tolist()
        return {id(parameter) for parameter, answer in zip(pending, answers, strict=True) if answer}

    def _shard_parameter(self, parameter: nn.Parameter, possible: bool) -> bool:
        """Shard a parameter, if possible. Returns False if it is in a block already, or stays whole."""
        if isinstance(parameter, Sharded):
            return parameter._block.is_single
        if not possible:
            return False
        if parameter in self._flattened:
            raise _no_vector()
        if not parameter.is_meta:  # has no values yet: its memory will be that of the parts
            self._ranks.broadcast_into(parameter, 0)
        hooks = hooks_of(parameter)
        set_hooks(parameter, None)
        shard(parameter, self._blocks)
        if hooks:
            _move_hooks(hooks, parameter)
        self._sharded_count += 1
        self._leave(parameter)
        return True

    def given_to_optimizer(self, parameter: Tensor) -> None:
        """Note a parameter that was given to an optimizer, if it has no values yet."""
        if parameter.is_meta:
            self._early[parameter] = None

    def check(self, optimizer: Optimizer) -> list[Sharded]:
        """Return the optimizer's sharded parameters.

        Raises:
            Refused: it is LBFGS, and has some. If its parameters are to be sharded later, that is refused.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sharded = [parameter for parameter in parameters if isinstance(parameter, Sharded)]
        if isinstance(optimizer, LBFGS):
            if sharded:
                raise _no_vector()
            self._flattened.update((parameter, None) for parameter in parameters)
        return sharded

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Shard optimizer state that was made before its parameter was sharded."""
        sharded = self.check(optimizer)
        if any(parameter in self._early for parameter in sharded):
            self._early.clear()
            self._say(
                f"strategy fsdp: {type(optimizer).__name__} was made before its parameters had values, and trains "
                "them; under python it would not, as to_empty makes new ones there: make it after to_empty"
            )
        for parameter in sharded:
            state: dict[str, Any] = optimizer.state.get(parameter) or {}
            state.update(_like_parameter(state, parameter))

    def has_view(self, tensor: Tensor) -> bool:
        """Return True if a plain tensor may be a view of a sharded parameter."""
        return self._blocks.views.have_memory_of(tensor)

    def note_order(self) -> None:
        """Call hooks on parameters in the order in which a pass computes their gradients."""
        self._blocks.notes_order = True

    @contextmanager
    def no_sync(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Within the context, hold the whole gradients of these parameters' blocks on each rank."""
        blocks, before = self._blocks, self._blocks.no_sync
        blocks.no_sync = before | {parameter._block for parameter in parameters if isinstance(parameter, Sharded)}
        try:
            yield
        finally:
            blocks.no_sync = before

    def recording(self) -> AbstractContextManager[None]:
        """Return a context for a pass with `create_graph`: it saves the positions of parameters, not their memory."""
        return saving_positions(self._blocks, {})

    def deferring(self) -> AbstractContextManager[None]:
        """Return a context of a backward pass, at whose end all gradients are in `.grad`."""
        return self._blocks.deferring()

    def close(self) -> None:
        """Remove the hook of optimizers, and end what is being gathered ahead of time."""
        if self._hook is not None:
            self._hook.remove()
        self._blocks.stop_prefetch()


def _no_vector() -> Refused:
    return Refused(
        f"LBFGS makes one vector of all parameters, which no rank holds with strategy fsdp, at {user_line()}; use "
        "another optimizer, or another strategy"
    )


def _like_parameter(state: dict[str, Any], parameter: Sharded) -> dict[str, Any]:
    """Return the state of a parameter with its tensors sharded as that is."""
    return {
        name: _shard_state(value, parameter) if type(value) is Tensor and value.shape == parameter.shape else value
        for name, value in state.items()
    }


_shards_of_states = WeakIdKeyDictionary()  # whole tensor -> its version then, and the sharded one made of it


def _shard_state(value: Tensor, parameter: Sharded) -> BatchTensor:
    """Return a tensor of a state, sharded. One that is loaded again has what steps have changed, as on one device."""
    known: tuple[int, BatchTensor] | None = _shards_of_states.get(value)
    if known is None or known[0] != version_of(value) or known[1]._spec != parameter._spec:
        known = version_of(value), shard_like(value, parameter)
        if value.device == parameter.device:  # else the optimizer copies it on one device, too
            _shards_of_states[value] = known
    return known[1]


def _group_on_host(group: Callable[..., Any], lists: list[list[Any]], *more: Any, **named: Any) -> Any:
    """Group what an optimizer updates; move counts of steps, made on the device of `p.device`, to offloaded rows."""
    for belonging in zip(*(tensors for tensors in lists if tensors), strict=True):
        if isinstance(belonging[0], Sharded):
            for count in belonging[1:]:
                if type(count) is Tensor and not count.dim() and count.device != belonging[0]._rows.device:
                    count.data = count.data.to(belonging[0]._rows.device)
    return group(lists, *more, **named)


def _groups_of_ranks(ranks: Collectives, machines: Sequence[Sequence[int]]) -> tuple[Collectives, Collectives | None]:
    """Return the ranks that hold a model together with this one, and those that hold the same part, if any."""
    if not machines:
        return ranks, None
    assert isinstance(ranks, ProcessCollectives)
    machine = next(members for members in machines if ranks.rank in members)
    replicas = [members[machine.index(ranks.rank)] for members in machines]
    return PartCollectives(ranks, machine, "machine"), PartCollectives(ranks, replicas, "replicas")


def _description(module: nn.Module, ranks: int, named: bool, offloads: bool) -> str:
    """Describe the parts of a model that each rank holds. named: names of blocks can be given by an option."""
    parameters = list(module.parameters())
    sharded = [parameter for parameter in parameters if isinstance(parameter, Sharded)]
    blocks = {id(parameter._block): parameter._block.size() for parameter in sharded}
    count = sum(parameter.numel() for parameter in sharded)
    replicated = sum(parameter.numel() for parameter in parameters if not isinstance(parameter, Sharded))
    largest = f"{max(blocks.values()) / 2**20:,.1f} MB"
    turns = f"{len(blocks)} blocks that are gathered in turn, the largest of {largest}"
    if len(blocks) == 1:
        turns = f"one block of {largest}, as no nn.ModuleList or nn.Sequential{' or --blocks' * named} divides it"
    what = f"{count:,} parameters of {type(module).__name__}{' in the memory of the host' * offloads}"
    line = f"strategy fsdp: each rank holds 1/{ranks} of {what}, in {turns}"
    return f"{line}; {replicated:,} stay whole" if replicated else line


def _check_room(module: nn.Module) -> None:
    """Check that a device can hold each block, which is whole while something computes with it.

    Raises:
        Refused: it cannot.
    """
    named_parameters = module.named_parameters()
    parameters = [(name, parameter) for name, parameter in named_parameters if isinstance(parameter, Sharded)]
    if not parameters:  # those that the script's own `parameters()` returns have no names
        return
    name, largest = max(parameters, key=lambda named: named[1]._block.size())
    size, room = largest._block.size(), memory_of(best())
    if size <= room:
        return
    what = f"{name} of shape {tuple(largest.shape)}" if largest._block.is_single else f"the block with {name}"
    raise Refused(
        f"{what} in {type(module).__name__} ({user_line()}) has {size / 2**30:,.1f} GiB, and a device "
        f"{room / 2**30:,.1f} GiB; with strategy fsdp a parameter is whole while something computes with it, and so "
        "is its block: divide it into several parameters, or into smaller blocks"
    )


def _can_be_sharded(parameter: Tensor, ranks: int) -> bool:
    """Return whether no other tensor or process shares the parameter's memory, and it has an entry for each rank."""
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.is_leaf
        and count_users(parameter) == 0
        and count_references(parameter) == 1
        and (not parameter.is_cpu or not parameter.is_shared())  # True for all on a GPU
        and shard_dimension(parameter, ranks) is not None
    )


def _move_hooks(hooks: dict[int, Any], parameter: Any) -> None:
    """Let a sharded parameter call the hooks of the whole one."""
    rows = parameter._rows
    batch = BatchTensor(rows, parameter._spec)
    moved = {key: hook_of_rows(batch, hook.hook) for key, hook in hooks.items() if isinstance(hook, WholeHook)}
    hooks.clear()  # the handles that a script holds refer to this dict
    hooks.update({**(hooks_of(rows) or {}), **moved})  # first the one that divides the gradient
    set_hooks(rows, hooks)


class Fsdp(Ddp):
    """Sharded parameters of models; others are replicated, and their gradients averaged.

    settings: which modules are blocks, whether these compute their activations again, and where parts are. every:
    whether every model is sharded, or those given to `shard`. machines: the ranks of each machine, each of which
    holds a copy of the model; empty: there is one copy.
    """

    def __init__(
        self,
        ranks: Collectives,
        settings: RunSettings,
        rng_digest: Callable[[], int],
        compression: Compression,
        every: bool,
        machines: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(ranks, rng_digest=rng_digest, compression=compression)
        self._settings, self._every, self._machines = settings, every, machines
        self._reads_in_pass = False  # whether the script has hooks
        self._replaced: list[tuple[Any, str, Any]] = []  # functions of torch: where they were, and themselves

    def view(self, ranks: Collectives, say: Callable[[str], None]) -> View:
        offloads = self._settings.cpu_offload
        for space, name in SINGLE_STEPS:
            self._replace(space, name, partial(update_rows, getattr(space, name)))
        if offloads:
            self._replace(*GROUP_ALIKE, staticmethod(partial(_group_on_host, getattr(*GROUP_ALIKE))))
        called = self.adopt, self.leave, self.reach, say
        self._make = partial(ModelSharding, ranks, *called, self._settings.blocks, self._every, offloads=offloads)
        self._sharding = self._make(self._machines)
        self._hybrid: ModelSharding | None = None  # of models that each machine holds a copy of
        recomputed = self._sharding.blocks if self._settings.checkpoint_activations else ()
        self._view = View(ranks, self.adopt, say, prepare_model=self.prepare_model, recomputed=recomputed)
        if self._every:
            self._view.add_sharded(self._sharding.view)
        return self._view

    def _replace(self, space: Any, name: str, function: Any) -> None:
        """Replace a function of torch until the run ends."""
        self._replaced.append((space, name, vars(space)[name]))
        setattr(space, name, function)

    def optimize(self, parameter: Tensor) -> None:
        self._sharding.given_to_optimizer(parameter)
        self.adopt(parameter)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        self._sharding.check(optimizer)

    def own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Shard a state dict, so that what is of sharded parameters is nowhere whole on the device."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(numbers) != len(parameters):  # torch raises an error
            return state
        states = dict(state["state"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if isinstance(parameter, Sharded) and isinstance(states.get(number), dict):
                states[number] = _like_parameter(states[number], parameter)
        return {**state, "state": states}

    def prepare_model(self, module: nn.Module) -> None:
        if self._every:
            self._sharding.shard(module)

    def shard(self, module: nn.Module, machines: Sequence[Sequence[int]] = ()) -> None:
        if machines and self._hybrid is None:
            self._hybrid = self._make(machines)
            if self._reads_in_pass:
                self._hybrid.note_order()
        sharding = self._hybrid if machines and self._hybrid is not None else self._sharding
        self._view.add_sharded(sharding.view)
        sharding.shard(module)

    def counts_writes(self, tensor: Tensor) -> bool:
        return any(sharding.has_view(tensor) for sharding in (self._sharding, self._hybrid) if sharding is not None)

    def read_in_pass(self) -> None:
        self._reads_in_pass = True
        for sharding in (self._sharding, self._hybrid):
            if sharding is not None:
                sharding.note_order()

    @contextmanager
    def no_sync(self, parameters: Iterable[Tensor] | None = None) -> Iterator[None]:
        listed = [] if parameters is None else [*parameters]  # of pieces: without further memory
        hybrid = nullcontext() if self._hybrid is None else self._hybrid.no_sync(listed)
        with super().no_sync(None if parameters is None else listed), self._sharding.no_sync(listed), hybrid:
            yield

    @contextmanager
    def backward(self, site: str) -> Iterator[None]:
        hybrid = nullcontext() if self._hybrid is None else self._hybrid.deferring()
        with super().backward(site), self._sharding.deferring(), hybrid:
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        hybrid = nullcontext() if self._hybrid is None else self._hybrid.recording()
        with self._sharding.recording(), hybrid:
            yield

    def close(self) -> None:
        super().close()
        while self._replaced:
            setattr(*self._replaced.pop())
        self._sharding.close()
        if self._hybrid is not None:
            self._hybrid.close()
