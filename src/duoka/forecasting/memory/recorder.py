"""Record what a script's first steps do to memory, in the worker that runs it on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from duoka.forecasting.memory.live import LiveStorages
from duoka.forecasting.memory.record import MemoryEvent, MemoryRecord, Scope, Storage, What, write
from duoka.forecasting.timer import samples
from duoka.plain.gpu_numbers import map_gpus
from duoka.plain.patching import Patches
from duoka.private.torch import in_backward, tree_leaves
from duoka.strategies.fsdp import blocks, groups
from duoka.supervision.status_board import StatusSlot
from duoka.trials.observer import StepWatcher, TrialObserver, watch_loaders


@dataclass(frozen=True)
class MemoryRecorder(TrialObserver):
    """A trial observer that records memory from the end of the first step on.

    blocks: as `duoka run --blocks`. plenty: bytes; a script that certainly needs less is ended after its first step.
    for_gpus: what the script puts on a GPU is on the CPU.
    """

    blocks: tuple[str, ...] = ()
    plenty: int = 0
    for_gpus: bool = False

    def watch(self, slot: StatusSlot) -> StepWatcher:
        return _Recording(self, slot)


@dataclass(slots=True)
class _Made:
    """The origin of a storage. scope: inferred from shape and inputs; the recorder may replace it later."""

    size: int
    shape: tuple[int, ...]
    scope: Scope
    call: int
    group: int  # of the only input, a parameter


class _Storages(LiveStorages):
    """Tracks the storages that a script allocates. record: its events are recorded only while `records` is True."""

    def __init__(self) -> None:
        super().__init__()
        self.record = MemoryRecord()
        self.records = False
        self.infos: dict[int, _Made] = {}
        self.peak = 0
        self.parameters: dict[int, int] = {}  # number of the storage -> group
        self.shapes: set[tuple[int, ...]] = set()  # of parameters, and the same transposed
        self.call, self.in_step, self.is_backward = -1, False, False

    def note(self, what: What, number: int) -> None:
        if self.records:
            self.record.events.append(MemoryEvent(what, number))

    def made(self, number: int, size: int, tensor: Tensor, inputs: list[int | None]) -> None:
        if in_backward() != self.is_backward:
            self.is_backward = not self.is_backward
            self.note("backward" if self.is_backward else "forward", 0)
        self.peak = max(self.peak, self.total)
        shape = tuple(tensor.shape)
        copied = [at for at in inputs if at in self.parameters]
        group = self.parameters[copied[0]] if len(inputs) == len(copied) == 1 else -1
        self.infos[number] = _Made(size, shape, self._scope(shape, inputs), self.call, group)
        self.note("made", number)

    def freed(self, number: int, size: int) -> None:
        self.note("freed", number)
        if not self.records:
            self.infos.pop(number, None)
            self.parameters.pop(number, None)

    def used(self, numbers: list[int | None]) -> None:
        if self.records and not self.in_step:
            for number in numbers:
                if number in self.parameters:
                    self.note("used", number)

    def _scope(self, shape: tuple[int, ...], inputs: list[int | None]) -> Scope:
        """Return the scope of a new tensor: whether it grows with the batch, from the inputs of its operator."""
        if self.in_step:
            return "optimizer"
        batch = self.record.batch
        if batch is None:  # before the first step
            return "kept"
        made = [None if at is None or at in self.parameters else self.infos[at].scope for at in inputs]
        if "rows" in made:
            is_gradient = shape in self.shapes and self.is_backward
            return "constant" if is_gradient else "rows"
        if inputs and all(
            at in self.parameters or scope == "constant" for at, scope in zip(inputs, made, strict=True)
        ):
            return "constant"
        is_batch = batch in shape or (bool(shape) and batch > 1 and shape[0] % batch == 0)
        return "rows" if is_batch and shape[0] else "constant"


class _Recording(StepWatcher):
    """The recording of one run."""

    def __init__(self, recorder: MemoryRecorder, slot: StatusSlot) -> None:
        super().__init__(recorder.folders.seen, slot.rank)
        self._wanted, self._plenty, self._names, self._slot = recorder.steps, recorder.plenty, recorder.blocks, slot
        self._storages = _Storages()
        self._models: WeakSet[nn.Module] = WeakSet()
        self._calls: list[tuple[nn.Module, int]] = []  # modules that are being called; the call of a block or -1
        self._blocks: WeakSet[nn.Module] = WeakSet()
        self._groups = self._next_call = 0
        self._groups_of: dict[int, int] = {}  # id of the parameter -> group
        self._kinds: dict[int, tuple[Scope, int, int]] = {}  # number of the storage -> scope, group, largest size
        self._from_loader = self._seeks = False
        self._for_gpus = recorder.for_gpus

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
        """Stop, and write the record."""
        self._storages.__exit__(None, None, None)
        record = self._storages.record
        record.steps = self.steps
        for number, made in self._storages.infos.items():
            unmarked = made.scope, made.group, max(made.shape, default=0)
            scope, group, largest = self._kinds.get(number, unmarked)
            record.storages[number] = Storage(made.size, scope, group, largest, made.call)
        write(self._folder, record)

    # --- batches and modules

    def _batch(self, loader: Any, batch: Any, is_local: bool) -> None:
        found = samples(batch, getattr(loader, "batch_size", None))
        if found is not None:
            self._from_loader, self._storages.record.batch = True, found
            for tensor in tree_leaves(batch):
                number = self._storages.number(tensor) if isinstance(tensor, Tensor) else None
                if number is not None:
                    self._storages.infos[number].scope = "rows"

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._calls:
            self._seeks = not self._from_loader
            self._root(module)
        if self._seeks:
            self._seek(args)
        call = -1
        if module in self._blocks and self._storages.call < 0:
            call, self._next_call = self._next_call, self._next_call + 1
            self._storages.call = call
            self._storages.note("enter", call)
        self._calls.append((module, call))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        while self._calls:
            left, call = self._calls.pop()
            if call >= 0:
                numbers = [self._storages.number(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
                self._storages.record.returned[call] = [number for number in numbers if number is not None]
                self._storages.call = -1
                self._storages.note("leave", call)
            if left is module:
                return

    def _seek(self, args: Any) -> None:
        """Set the size of the batch: that of the first tensor that a module is given."""
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if first is not None:
            self._seeks = False
            self._storages.record.batch = int(first.shape[0])
            number = self._storages.number(first)
            if number is not None and number not in self._kinds:
                self._storages.infos[number].scope = "rows"

    def _root(self, module: nn.Module) -> None:
        """Find the blocks of a model at its first call."""
        if module in self._models or next(iter(module.parameters()), None) is None:
            return
        self._models.add(module)
        found = blocks(module, self._names)
        self._blocks.update(found)
        for group in groups(module, found):
            for parameter in group:
                self._groups_of.setdefault(id(parameter), self._groups)
            self._groups += 1
        self._resolve([])

    # --- steps

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._resolve(self._held(optimizer))
        self._storages.in_step = True
        self._storages.note("step", 0)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._storages.in_step = False
        self._storages.note("stepped", 0)
        self._resolve(self._held(optimizer))
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor):
                    self._mark(value, "state", parameter)
        if self._slot.steps == self.steps:  # another optimizer of the same step
            return
        self.steps = self._slot.steps
        if not self._storages.records:
            record = self._storages.record
            record.bound = self._storages.peak + self._later()
            if record.bound <= self._plenty:
                self.enough()
            record.alive = list(self._storages.infos)
            self._storages.records = True
        if self.steps >= self._wanted:
            self.enough()

    def _later(self) -> int:
        """Return bytes that later steps need beside the peak of the first: the state, and buckets of gradients."""
        infos = self._storages.infos
        scopes = {number: scope for number, (scope, _, _) in self._kinds.items() if number in infos}
        state = sum(infos[number].size for number, scope in scopes.items() if scope == "state")
        return state + sum(infos[number].size for number, scope in scopes.items() if scope == "parameter")

    def _held(self, optimizer: Optimizer) -> list[Tensor]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _resolve(self, held: list[Tensor]) -> None:
        """Note which storages are parameters, gradients and buffers now."""
        for parameter in [*held, *(one for model in self._models for one in model.parameters())]:
            self._mark(parameter, "parameter", parameter)
            number = self._storages.number(parameter)
            if number is not None:
                self._storages.parameters[number] = self._groups_of.get(id(parameter), -1)
            shape = tuple(parameter.shape)
            self._storages.shapes |= {shape, shape[::-1]}
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradient", parameter)
        for model in self._models:
            for buffer in model.buffers():
                self._mark(buffer, "constant", buffer)

    def _mark(self, tensor: Tensor, scope: Scope, parameter: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        self._storages.follow(tensor, [])
        number = self._storages.number(tensor)
        if number is not None:
            group = self._groups_of.get(id(parameter), -1)
            self._kinds[number] = scope, group, max(parameter.shape, default=0)
