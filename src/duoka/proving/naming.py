"""Names of the trained tensors, as in the script: `model.fc1.weight`.

Models are found on Python's heap, so that it does not matter how they were made (copied, loaded, taken from a
library). A parameter of no model is named by its position in its optimizer.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from duoka.checkpoint.names import WRAPPERS
from duoka.private.torch import TENSORS_AND_CHILDREN, children_in
from duoka.proving.recording import TensorKind
from duoka.system.modules import is_users


class TensorNames:
    """The trained tensors of a script, by name."""

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
                full = f"{root}.{_plain(name)}"
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
        modules, optimizers = _live_objects()
        trained = {id(parameter) for module in (optimizer, *optimizers) for _, parameter in _parameters_of(module)}
        known = {id(model()) for _, model in self._models}
        new = [module for module in _outermost(modules) if id(module) not in known and _trains(module, trained)]
        script_names = _script_names(new)
        names = Counter(name for name, _ in self._models)
        for model in sorted(new, key=lambda module: script_names.get(id(module), "")):
            name = script_names.get(id(model)) or type(model).__name__
            names[name] += 1
            self._models.append((name if names[name] == 1 else f"{name}#{names[name]}", ref(model)))


def _live_objects() -> tuple[list[nn.Module], list[Optimizer]]:
    modules: list[nn.Module] = []
    optimizers: list[Optimizer] = []
    for entry in gc.get_objects():
        kind = type(entry)  # an object's own __class__ may be overridden
        if issubclass(kind, nn.Module):
            modules.append(entry)
        elif issubclass(kind, Optimizer):
            optimizers.append(entry)
    return modules, optimizers


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in children_in(module).values()}
    return [module for module in modules if id(module) not in inner]


def _trains(model: nn.Module, trained: set[int]) -> bool:
    return TENSORS_AND_CHILDREN[-1] in model.__dict__ and any(
        id(parameter) in trained for parameter in model.parameters()
    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor, TensorKind]]:
    yield from ((name, tensor, "parameter") for name, tensor in model.named_parameters())
    yield from ((name, tensor, "buffer") for name, tensor in model.named_buffers())


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.__dict__.get("param_groups", ())):
        for index, parameter in enumerate(group["params"]):
            yield f"group {number} parameter {index}", parameter


def _plain(name: str) -> str:
    """Remove the names of wrappers such as DataParallel and torch.compile."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


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
