"""In every worker: record gradients before and models' tensors after each step, and digests of the training batches.

It draws no random numbers, changes no tensor (except by a nudge), and communicates only to gather sharded tensors.
Rank 0 writes the states, each rank its own rows of the batches: together they are those of one device.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from duoka.checkpoint.names import unwrapped
from duoka.plain.patching import Patches
from duoka.private.torch import TENSORS_AND_CHILDREN, children_in, keystr, tree_flatten_with_path
from duoka.proving.recording import ROW_DIGEST, RecordingWriter, TensorKind, batches_file, plain_values
from duoka.system.user_code import is_users, user_line
from duoka.trials.observer import TrialObserver, opened, watch_loaders
from duoka.view.tensor.batch import BatchTensor

# The names of what is recorded.


class TensorNames:
    """The trained tensors of a script, by their names in it: `model.fc1.weight`.

    Models are found on Python's heap, so that it does not matter how they were made (copied, loaded, taken from a
    library). A parameter of no model is named by its position in its optimizer.
    """

    def __init__(self) -> None:
        self._models: list[tuple[str, ref[nn.Module]]] = []
        self._optimizers: list[ref[Optimizer]] = []

    def number(self, optimizer: Optimizer) -> int:
        """Return an optimizer's number, from 0, in the order of their first steps."""
        for number, known in enumerate(self._optimizers):
            if known() is optimizer:
                return number
        self._look(optimizer)
        return len(self._optimizers) - 1

    def tensors(self) -> Iterator[tuple[str, Tensor, TensorKind]]:
        """Yield name, tensor and kind: all tensors of trained models, then parameters of no model."""
        taken: Counter[str] = Counter()
        seen: set[int] = set()
        for root, known in self._models:
            model = known()
            for name, tensor, kind in _tensors_of(model) if model is not None else ():
                seen.add(id(tensor))
                full = f"{root}.{unwrapped(name)}"
                taken[full] += 1
                yield (full if taken[full] == 1 else f"{full}#{taken[full]}"), tensor, kind
        for number, alive in enumerate(self._optimizers):
            optimizer = alive()
            for position, parameter in _parameters_of(optimizer) if optimizer is not None else ():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"optimizer {number} {position}", parameter, "parameter"

    def _look(self, optimizer: Optimizer) -> None:
        """Find the models whose parameters this optimizer, or another one that exists, updates."""
        self._optimizers.append(ref(optimizer))
        gc.collect()  # removes dead models in reference cycles
        kinds = [(entry, type(entry)) for entry in gc.get_objects()]  # an object's own __class__ may be overridden
        modules = [entry for entry, kind in kinds if issubclass(kind, nn.Module)]
        optimizers = [entry for entry, kind in kinds if issubclass(kind, Optimizer)]
        inner = {id(child) for module in modules for child in children_in(module).values()}
        trained = {id(parameter) for each in (optimizer, *optimizers) for _, parameter in _parameters_of(each)}
        known = {id(model()) for _, model in self._models} | inner
        new = [
            module
            for module in modules
            if id(module) not in known
            and TENSORS_AND_CHILDREN[-1] in module.__dict__  # its __init__ has run
            and any(id(parameter) in trained for parameter in module.parameters())
        ]
        script_names = _script_names(new)
        names = Counter(name for name, _ in self._models)
        for model in sorted(new, key=lambda module: script_names.get(id(module), "")):
            name = script_names.get(id(model)) or type(model).__name__
            names[name] += 1
            self._models.append((name if names[name] == 1 else f"{name}#{names[name]}", ref(model)))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor, TensorKind]]:
    yield from ((name, tensor, "parameter") for name, tensor in model.named_parameters())
    yield from ((name, tensor, "buffer") for name, tensor in model.named_buffers())


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.__dict__.get("param_groups", ())):
        for index, parameter in enumerate(group["params"]):
            yield f"group {number} parameter {index}", parameter


def _script_names(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the script's variable names for these models, by id."""
    wanted = {id(model) for model in models}
    names: dict[int, str] = {}
    for variables in _namespaces():
        for name, value in list(variables.items()):
            for called, item in _items_of(name, value):
                if id(item) in wanted and not name.startswith("__"):
                    names.setdefault(id(item), called)
    return names


def _namespaces() -> Iterator[Mapping[str, Any]]:
    """Yield the script's variables: of running functions, the innermost first, then of its main module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame.f_locals
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def _items_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, the items of a list or dict, and the attributes of an object of the script's own class."""
    yield name, value
    if type(value) in (list, tuple):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif type(value) is dict:
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif not isinstance(value, (type, nn.Module)) and type(getattr(value, "__dict__", None)) is dict:
        yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items()))


# The recording.


class Recorder(TrialObserver):
    """Records one run on a rank. Each step of each optimizer counts.

    nudge: None, or the seed of the directions in which weights are moved.
    """

    def __init__(self, wanted: int, seed: int, own_rows: bool, nudge: int | None) -> None:
        super().__init__(wanted, seed, own_rows)
        self._nudge = None if nudge is None else Nudge(nudge)
        self._names = TensorNames()
        self._losses: list[Tensor] = []

    def install(self) -> None:
        self._writer = RecordingWriter(self.folder, self.wanted) if self.slot.rank == 0 else None
        self._batches = BatchRecorder(self.folder, self.slot.rank, self.own_rows)
        if self._nudge is not None:
            self._nudge.install()
        self._batches.install()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        Patches().around(torch.autograd, "backward")(self._backward)

    def close(self) -> None:
        self._batches.close()
        if self._writer is not None:
            self._writer.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps == 0:  # not at the begin of the script: models and their weights are known only now
            self._record(optimizer)
            if self._nudge is not None:  # parameters of no model, which no call has moved
                self._nudge.move(tensor for group in optimizer.param_groups for tensor in group["params"])
        if not self.own_rows and not self.over:  # ranks of a script's own may scale theirs
            self._record_gradients(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.over:
            self.steps += 1
            self._batches.step = self.steps + 1
            self._record(optimizer)
            self._losses.clear()
        if self.steps >= self.wanted:
            self.enough()

    def _record_gradients(self, optimizer: Optimizer) -> None:
        self._names.number(optimizer)
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._write(
            (f"gradient of {name}", tensor.grad, "gradient")
            for name, tensor, _ in self._names.tensors()
            if id(tensor) in updated and tensor.grad is not None
        )

    def _record(self, optimizer: Optimizer) -> None:
        self._names.number(optimizer)
        self._write(self._names.tensors())
        if self._writer is not None:
            self._writer.end(self.steps, [float(loss) for loss in self._losses])

    def _write(self, tensors: Iterable[tuple[str, Tensor, TensorKind]]) -> None:
        whole = (
            (name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, kind)  # sharded ones
            for name, tensor, kind in tensors
        )
        if self._writer is not None:
            self._writer.add(whole)
        deque(whole, maxlen=0)  # gathering a sharded tensor needs every rank

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and not isinstance(tensors, BatchTensor):
            self._losses.append(tensors.detach().clone())  # read at the next step: no synchronization here
        return original(tensors, *args, **kwargs)


_VALUES = (str, bytes, int, float, complex, bool, type(None))


class BatchRecorder:
    """Writes digests of the batches of one rank to a file, one line for each batch.

    own_rows: True if a plain tensor holds only this rank's rows; False if it holds the same rows on all ranks.
    """

    def __init__(self, folder: Path, rank: int, own_rows: bool) -> None:
        self._file = opened(folder / batches_file(rank))
        self._own_rows = own_rows
        self._inside = self._has_loader = False
        self.step = 1

    def install(self) -> None:
        watch_loaders(lambda loader, batch: self._write("loader", batch))
        Patches().around(nn.Module, "__call__")(self._call)

    def close(self) -> None:
        self._file.close()

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Of a script without a loader the arguments of outermost training calls are its batches.
        if self._inside or self._has_loader or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._inside = True
        try:
            self._write("model", (args, kwargs))
            return original(module, *args, **kwargs)
        finally:
            self._inside = False

    def _write(self, source: str, batch: Any) -> None:
        self._has_loader = self._has_loader or source == "loader"
        leaves, values = [], hashlib.blake2b(digest_size=8)
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, np.ndarray) and leaf.dtype != object:
                leaf = torch.from_numpy(np.ascontiguousarray(leaf)) if leaf.dtype.kind in "biufc" else leaf.tobytes()
            if isinstance(leaf, Tensor):
                if source == "loader" or not leaf.requires_grad:  # a tensor computed by the model is not data
                    leaves.append({"at": keystr(path), **_rows(leaf, self._own_rows)})
            else:
                known = leaf if isinstance(leaf, _VALUES) else type(leaf).__name__
                values.update(f"{keystr(path)} {known!r}\n".encode())
        line = {"step": self.step, "source": source, "line": user_line(), "leaves": leaves}
        self._file.write(json.dumps(line | {"values": values.hexdigest()}) + "\n")
        self._file.flush()  # a rank may be killed


@torch.no_grad()
def _rows(tensor: Tensor, own_rows: bool) -> dict[str, Any]:
    """Describe a tensor of a batch: type, shape of a row, ranks that hold its rows, digests of the local rows."""
    shared = isinstance(tensor, BatchTensor) and tensor._spec.dim == 0 and tensor._spec.outer == 1
    local = tensor.to_local() if isinstance(tensor, BatchTensor) else tensor
    kind = "cut" if shared else "own" if own_rows or isinstance(tensor, BatchTensor) else "whole"
    local = plain_values(local)
    flat = local.contiguous()
    flat = flat.reshape(flat.shape[0] if flat.dim() else 1, -1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros((flat.shape[0], 0), np.uint8)
    digests = "".join(hashlib.blake2b(row.data, digest_size=ROW_DIGEST // 2).hexdigest() for row in data)
    return {"dtype": str(local.dtype), "shape": list(local.shape[1:]), "kind": kind, "rows": digests}


FINE = 2.0**-20  # types with a smaller unit in the last place have all weights moved
SOME = 1 / 16  # of the weights, of all other types
TF32 = 2.0**-10


class Nudge:
    """Moves every parameter once. seed: of the directions."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._moved: dict[int, Tensor] = {}  # by id; kept alive, so that no other tensor gets the id

    def install(self) -> None:
        """Hook module calls, to move a model's parameters at its first call."""
        Patches().around(nn.Module, "__call__")(self._call)

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.move(module.parameters())
        return original(module, *args, **kwargs)

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors that were not moved yet. Zero stays zero."""
        for tensor in tensors:
            if id(tensor) in self._moved or not tensor.is_floating_point():
                continue
            self._moved[id(tensor)] = tensor
            # By numpy: the script's own generators must draw what they would have drawn.
            up = torch.from_numpy(self._draw.integers(0, 2, tuple(tensor.shape), dtype=np.int8)).to(tensor.device)
            unit, sign = _unit(tensor), 2 * up - 1
            if unit > FINE:  # another order of addition changes few results of a coarse type
                sign *= torch.as_tensor(self._draw.random(tuple(tensor.shape)) < SOME).to(tensor.device)
            wide = tensor.detach().to(torch.float64)
            tensor.data.copy_((wide + sign * unit * wide.abs()).to(tensor.dtype))


def _unit(tensor: Tensor) -> float:
    """Return the unit in the last place of 1, in the type in which this parameter is used now."""
    device, unit = tensor.device.type, torch.finfo(tensor.dtype).eps
    if torch.is_autocast_enabled(device):
        unit = max(unit, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device != "cpu" and (torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"):
        unit = max(unit, TF32)
    return unit
