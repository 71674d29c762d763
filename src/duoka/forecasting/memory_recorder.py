"""Record what a script's first steps do to memory, in the worker that runs it on one device.

A storage is counted from the operator that returns a tensor of it until it is freed, and if torch has allocated it:
not a NumPy array's or a shared one. Memory that an operator needs only while it runs, and that of communication
libraries, is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from duoka.forecasting.moments import MemoryRecord, Scope, Storage, Timeline
from duoka.forecasting.timer import samples
from duoka.plain.gpu_numbers import map_gpus
from duoka.plain.patching import Patches
from duoka.private.torch import TorchDispatchMode, in_backward, tree_leaves
from duoka.sharding.block import divide, groups
from duoka.trials.observer import TrialObserver, watch_loaders
from duoka.view.tensor.batch import BatchTensor


class Storages(TorchDispatchMode):
    """Numbers the storages that operators make while this mode is active, and tells a timeline of each."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.total = self.peak = 0  # bytes that are alive, and the most so far
        self.batch: int | None = None  # samples in that of a step, if they are known
        self.shapes: set[tuple[int, ...]] = set()  # of parameters, and the same transposed
        self.call, self.in_step = -1, False  # of a block, in which the script is; -1: none
        # id of the storage -> number, bytes, itself. torch keeps one Python object for a storage as long as it lives.
        self._numbers: dict[int, tuple[int, int, ref[Any]]] = {}
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the call: an operator in place may replace the storage of an input.
        inputs = [self.number(tensor) for tensor in _plain((*args, *kwargs.values()))]
        out = func(*args, **kwargs)
        for tensor in _plain(out if isinstance(out, (tuple, list)) else (out,)):
            self.follow(tensor, inputs)
        return out

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it is not followed."""
        entry = self._numbers.get(id(tensor.untyped_storage()))
        return None if entry is None else entry[0]

    def follow(self, tensor: Tensor, inputs: list[int | None]) -> None:
        """Follow the storage of a tensor from now on. inputs: of the operator that made it; None: not followed."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), id(storage)
        known = self._numbers.get(key)
        if known is not None and known[1] == size:
            return
        if known is not None:  # resized
            self._forget(key)
        if not size or not storage.resizable():  # one of other memory cannot be resized
            return
        self._next += 1
        self._numbers[key] = self._next, size, ref(storage, lambda _: self._forget(key))
        self.total += size
        self.peak = max(self.peak, self.total)
        if in_backward() != self.timeline.is_backward:
            self.timeline.begin("forward" if self.timeline.is_backward else "backward")
        of = [self.timeline.storages[at] for at in inputs if at in self.timeline.storages]
        block = of[0].block if len(inputs) == len(of) == 1 and of[0].scope == "parameter" else -1  # of a cast
        scope = self._scope(tuple(tensor.shape), {made.scope for made in of}, len(of) < len(inputs))
        self.timeline.make(self._next, Storage(size, scope, block, self.call))

    def _forget(self, key: int) -> None:
        number, size, _ = self._numbers.pop(key)
        self.total -= size
        self.timeline.free(number)

    def _scope(self, shape: tuple[int, ...], scopes: set[Scope], of_others: bool) -> Scope:
        """Return the scope of a new tensor: whether it grows with the batch.

        scopes: of the inputs of its operator. of_others: it had inputs that are not followed, too.
        """
        if self.in_step:
            return "optimizer"
        batch = self.batch
        if batch is None:  # before the first step
            return "kept"
        if "rows" in scopes:
            is_gradient = shape in self.shapes and self.timeline.is_backward
            return "constant" if is_gradient else "rows"
        if scopes and scopes <= {"constant", "parameter", "gradient"} and not of_others:
            return "constant"
        is_batch = batch in shape or (bool(shape) and batch > 1 and shape[0] % batch == 0)
        return "rows" if is_batch and shape[0] else "constant"


def _plain(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors with memory of their own, in lists of the values, too."""
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, BatchTensor) and value.layout is torch.strided and not value.is_meta:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _plain(value)


class MemoryRecorder(TrialObserver):
    """Records memory from the end of the first step on."""

    def __init__(
        self, wanted: int, seed: int, blocks: tuple[str, ...] = (), plenty: int = 0, for_gpus: bool = False
    ) -> None:
        super().__init__(wanted, seed)
        self._names = blocks  # as `duoka run --blocks`
        self._plenty = plenty  # bytes; a script that certainly needs less is ended after its first step
        self._for_gpus = for_gpus  # what the script puts on a GPU is on the CPU
        self._storages = Storages()
        self._timeline = self._storages.timeline
        self._models: WeakSet[nn.Module] = WeakSet()
        self._calls: list[tuple[nn.Module, int]] = []  # modules that are being called; the call of a block or -1
        self._blocks: WeakSet[nn.Module] = WeakSet()
        self._next_block = self._next_call = 0
        self._block_of: dict[int, int] = {}  # id of the parameter -> number of its block
        self._hooked = WeakIdKeyDictionary()  # parameters whose gradients are seen when they are accumulated
        self._scopes = Counter[str]()  # bytes at the first moment
        self._bound = 0
        self._from_loader = self._seeks = False

    def install(self) -> None:
        """Observe operators, modules, batches and optimizers until the script ends."""
        if self._for_gpus:
            map_gpus(Patches(), torch.device("cpu"), lambda text: None)
        watch_loaders(self._batch)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._after)
        self._storages.__enter__()

    def close(self) -> None:
        self._storages.__exit__(None, None, None)
        moments = self._timeline.moments
        MemoryRecord(self.steps, self._storages.batch, self._bound, dict(self._scopes), moments).write(self.folder)

    # --- batches and modules

    def _batch(self, loader: Any, batch: Any) -> None:
        count = samples(batch, getattr(loader, "batch_size", None))
        if count is not None:
            self._from_loader, self._storages.batch = True, count
            for tensor in tree_leaves(batch):
                number = self._storages.number(tensor) if isinstance(tensor, Tensor) else None
                if number is not None:
                    self._timeline.classify(number, "rows")

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._calls:  # an outermost call: of a model
            self._seeks = not self._from_loader
            self._root(module)
        if self._seeks:
            self._seek(args)
        call = -1
        if module in self._blocks and self._storages.call < 0:  # not within another block
            call, self._next_call = self._next_call, self._next_call + 1
            self._storages.call = call
        self._calls.append((module, call))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        while self._calls:
            left, call = self._calls.pop()
            if call >= 0:
                numbers = [self._storages.number(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                self._timeline.leave(call, [number for number in numbers if number is not None])
                self._storages.call = -1
            if left is module:
                return

    def _seek(self, args: Any) -> None:
        """Set the size of the batch: that of the first tensor that a module is given."""
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if first is not None:
            self._seeks = False
            self._storages.batch = int(first.shape[0])
            number = self._storages.number(first)
            if number is not None and self._timeline.storages[number].scope in ("kept", "constant"):
                self._timeline.classify(number, "rows")

    def _root(self, module: nn.Module) -> None:
        """Find the blocks of a model at its first call."""
        if module in self._models or next(iter(module.parameters()), None) is None:
            return
        self._models.add(module)
        modules = divide(module, self._names)
        self._blocks.update(modules)
        for group in groups(module, modules):
            for parameter in group:
                self._block_of.setdefault(id(parameter), self._next_block)
            self._next_block += 1
        self._resolve()

    # --- steps

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._resolve(optimizer)
        self._storages.in_step = True
        self._timeline.begin("step")

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._storages.in_step = False
        self._resolve(optimizer)
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._mark(value, "state", parameter)
        if self.slot.steps == self.steps:  # another optimizer of the same step
            return
        self.steps = self.slot.steps
        if not self._timeline.records:
            for storage in self._timeline.storages.values():
                self._scopes[storage.scope] += storage.size
            # Later steps need beside the peak of the first: the state, and buckets of gradients.
            self._bound = self._storages.peak + self._scopes["state"] + self._scopes["parameter"]
            if self._bound <= self._plenty:
                self.enough()
            self._timeline.record()
        if self.steps >= self.wanted:
            self.enough()

    def _resolve(self, optimizer: Optimizer | None = None) -> None:
        """Note which storages are parameters, gradients and buffers now."""
        held = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        for parameter in [*chain(*held), *(parameter for model in self._models for parameter in model.parameters())]:
            self._mark(parameter, "parameter", parameter)
            shape = tuple(parameter.shape)
            self._storages.shapes |= {shape, shape[::-1]}
            self._mark_gradient(parameter)
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._mark_gradient)
        for model in self._models:
            for buffer in model.buffers():
                self._mark(buffer, "constant", buffer)

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, "gradient", parameter)

    def _mark(self, tensor: Tensor, scope: Scope, parameter: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        self._storages.follow(tensor, [])
        number = self._storages.number(tensor)
        if number is not None:
            self._timeline.classify(number, scope, self._block_of.get(id(parameter), -1))
