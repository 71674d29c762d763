"""Norms of the gradients of sharded parameters, which ranks exchange together.

Scripts that clip by hand read the norm of one gradient after the other. When the first is read, those that were read
after the last exchange are computed and exchanged with it, so the others are known then. They are forgotten with
every write to parameters or gradients.

What is exchanged follows from what scripts read, in their order. A rank on which a parameter is deleted earlier than
on another sends 0 in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from duoka.private.torch import in_backward, memory_of, version_of
from duoka.view.tensor.batch import BatchTensor


@dataclass(eq=False, slots=True)
class _Parameter:
    """A parameter's rows on this rank. count, memory: entries and memory of the gradient that the script got."""

    rows: ReferenceType[Tensor]
    count: int = 0
    memory: int = 0

    def gradient(self) -> Tensor | None:
        rows = self.rows()
        return None if rows is None else rows.grad


@dataclass(slots=True)
class _Group:
    """Norms of one kind."""

    asked: list[_Parameter] = field(default_factory=list)  # for which the script asks, in order
    again: set[_Parameter] = field(default_factory=set)  # for which it has asked since these were exchanged
    known: dict[_Parameter, tuple[int, Tensor]] = field(default_factory=dict)  # with the version of the gradient
    written: int = 0  # `View.written` when they were exchanged

    def to_exchange(self, parameter: _Parameter) -> list[_Parameter]:
        """Return the parameters whose norms are exchanged when that of `parameter` is not known."""
        if parameter not in self.asked:
            self.asked.append(parameter)
            return [parameter]
        self.asked = [asked for asked in self.asked if asked is parameter or asked in self.again]
        self.again.clear()
        return self.asked


class GradientNorms:
    """The norms of the gradients of a view's parameters."""

    def __init__(self) -> None:
        self._groups: dict[Any, _Group] = {}
        self._parameters = WeakIdKeyDictionary()  # by their rows
        self._by_memory: dict[int, _Parameter] = {}

    def seen(self, rows: Tensor, gradient: BatchTensor) -> None:
        """Note that the script gets the gradient of a parameter. rows: the parameter's."""
        parameter: _Parameter = self._parameters.setdefault(rows, _Parameter(ref(rows)))
        if self._by_memory.get(parameter.memory) is parameter:
            del self._by_memory[parameter.memory]
        parameter.memory, parameter.count = memory_of(gradient._rows), gradient._meta.shape.numel()
        self._by_memory[parameter.memory] = parameter

    def forget(self) -> None:
        """Forget all norms, as a gradient is replaced."""
        for group in self._groups.values():
            group.known.clear()

    def of(
        self,
        batch: BatchTensor,
        kind: Any,
        compute: Callable[[Tensor], Tensor],
        exchange: Callable[[list[Tensor]], list[Tensor]],
    ) -> Tensor | None:
        """Return the norm of a gradient; None if the batch is another tensor.

        kind: of norm. compute: returns the norm of one rank's rows. exchange: returns norms of whole gradients, for
        those of this rank's rows.
        """
        view, rows = batch._spec.view, batch._local
        parameter = self._by_memory.get(memory_of(rows))
        gradient = None if parameter is None else parameter.gradient()
        if parameter is None or gradient is None or memory_of(gradient) != memory_of(rows):
            return None
        if batch._meta.shape.numel() != parameter.count or rows.requires_grad or in_backward():
            return None
        if view.aliased.of_memory(rows):  # to which the script may write without notice
            return None
        if view.shares.recorder is not None:  # of what is exchanged only sometimes
            view.shares.recorder.abandon()
        group = self._groups.setdefault((kind, rows.dtype, rows.device), _Group())
        if group.written != view.written:
            group.known.clear()
            group.written = view.written
        version, norm = group.known.get(parameter, (-1, rows))
        if version != version_of(gradient):
            together = group.to_exchange(parameter)
            gradients = [member.gradient() for member in together]
            norms = [
                torch.zeros_like(compute(rows)) if gradient is None else compute(gradient) for gradient in gradients
            ]
            for member, gradient, exchanged in zip(together, gradients, exchange(norms), strict=True):
                if gradient is not None:
                    group.known[member] = version_of(gradient), exchanged
            norm = group.known[parameter][1]
        group.again.add(parameter)
        return norm.clone()  # to which the script may write
