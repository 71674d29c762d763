"""Checks after each backward pass, for the models that it reached.

With DistributedDataParallel the user says beforehand which parameters a pass leaves out; here they are named
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from duoka.collectives.base import Collectives
from duoka.errors import OptionError, Refused
from duoka.system.user_code import user_line
from duoka.view.tensor.batch import BatchTensor

Reached = Callable[[Tensor], int | None]


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """Options of DistributedDataParallel, by its names."""

    find_unused_parameters: bool | None = None  # True: a pass may leave out parameters; None: it is reported once
    static_graph: bool = False  # every pass must reach the same parameters
    broadcast_buffers: bool | None = None  # rank 0's, after each pass; None: if ranks may compute different ones
    gradient_as_bucket_view: bool = False  # gradients are views of larger tensors, which saves a copy

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, bool) and value is not None:
                raise OptionError(name, value, "True or False")


@dataclass(slots=True)
class _Observed:
    """State of one model. passes: number of passes that reached it. first: parameters that the first one reached."""

    options: DdpOptions
    parameters: list[Tensor]
    passes: int = 0
    first: frozenset[str] = frozenset()
    reported: bool = False


class BackwardObserver:
    """Observes the end of each backward pass (`Strategy.observe`). local_norm: BatchNorm differs between ranks."""

    def __init__(self, ranks: Collectives, local_norm: bool, say: Callable[[str], None]) -> None:
        self._ranks, self._local_norm, self._say = ranks, local_norm, say
        self._models: WeakKeyDictionary[nn.Module, _Observed] = WeakKeyDictionary()

    def observe(self, module: nn.Module, options: DdpOptions) -> None:
        """Observe the passes that reach `module`."""
        self._models[module] = _Observed(options, list(module.parameters()))

    def __call__(self, reached: Reached) -> None:
        """Check a pass that has ended, on every rank. reached: returns None for a parameter that it did not reach.

        Raises Refused if it left out parameters that it must reach.
        """
        for module, observed in list(self._models.items()):
            if all(reached(parameter) is None for parameter in observed.parameters):
                continue
            observed.passes += 1
            self._check_parameters(module, observed, reached)
            asked = observed.options.broadcast_buffers
            if asked or (asked is None and self._local_norm):
                self._broadcast_buffers([each for each in module.buffers() if not isinstance(each, BatchTensor)])

    def _check_parameters(self, module: nn.Module, observed: _Observed, reached: Reached) -> None:
        options, find_unused = observed.options, observed.options.find_unused_parameters
        often = options.static_graph or find_unused is False
        if not often and (find_unused or observed.reported or observed.passes & (observed.passes - 1)):
            return
        wanted = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        trained = frozenset(name for name, parameter in module.named_parameters() if reached(parameter) is not None)
        observed.first = observed.first or trained
        if options.static_graph and observed.first != trained:
            names = _owners(module, set(observed.first ^ trained))
            raise Refused(
                f"the backward pass at {user_line()} reached other parameters of {type(module).__name__} than the "
                f"first one, with static_graph=True: {names}"
            )
        if find_unused or observed.reported or wanted <= trained:
            return
        text = f"{type(module).__name__}: no gradient at {user_line()} for {_owners(module, wanted - trained)}"
        if find_unused is False:
            raise Refused(f"{text}; but find_unused_parameters=False was given")
        observed.reported = True
        self._say(f"{text} (find_unused_parameters=True if so meant)")

    def _broadcast_buffers(self, buffers: list[Tensor]) -> None:
        """Copy rank 0's buffers to all ranks, with one broadcast for each dtype."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = self._ranks.broadcast(torch.cat([buffer.detach().flatten() for buffer in alike]), 0)
            with torch.no_grad():
                for buffer, part in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
                    buffer.copy_(part.view_as(buffer))


def _owners(module: nn.Module, names: set[str]) -> str:
    """Return parameters by the module that owns them: `head (Linear): weight, bias; norm (LayerNorm): bias`."""
    listed = [name.rpartition(".") for name, _ in module.named_parameters() if name in names]
    groups = [
        (owner, [parameter for *_, parameter in each]) for owner, each in groupby(listed, key=lambda parts: parts[0])
    ]
    return "; ".join(f"{_named(module, owner)}: {', '.join(parameters)}" for owner, parameters in groups)


def _named(module: nn.Module, owner: str) -> str:
    kind: Any = type(module.get_submodule(owner))
    return f"{owner} ({kind.__name__})" if owner else kind.__name__
