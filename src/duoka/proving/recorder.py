"""Record gradients before and models' tensors after each step, in every worker; end the script after some steps.

Draws no random numbers, changes no tensor (except by a nudge), and communicates only to gather DTensors. Rank 0
writes the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from duoka.proving.batches import BatchRecorder
from duoka.proving.naming import TensorNames
from duoka.proving.nudge import Nudge
from duoka.proving.recording import RecordingWriter
from duoka.supervision.status_board import StatusSlot
from duoka.trials.observer import StepWatcher, TrialObserver
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor


@dataclass(frozen=True)
class RecordingObserver(TrialObserver):
    """Records one run. nudge: None, or the seed of the directions in which weights are moved."""

    nudge: int | None

    def watch(self, slot: StatusSlot) -> _RecordingWatcher:
        return _RecordingWatcher(self, slot.rank)


class _RecordingWatcher(StepWatcher):
    """The record of one rank. Each step of each optimizer counts."""

    def __init__(self, recorder: RecordingObserver, rank: int) -> None:
        folder = recorder.folders.seen
        super().__init__(folder, rank)
        self._wanted = recorder.steps
        self._writer = RecordingWriter(folder, recorder.steps) if rank == 0 else None
        self._batches = BatchRecorder(folder, rank, recorder.own_rows)
        self._nudge = None if recorder.nudge is None else Nudge(recorder.nudge)
        self._names = TensorNames()
        self._with_gradients = not recorder.own_rows  # ranks of a script's own may scale theirs
        self._losses: list[Tensor] = []

    def install(self) -> None:
        """Hook optimizer steps, backward passes and batches."""
        if self._nudge is not None:
            self._nudge.install()
        self._batches.install()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        torch.autograd.backward = self._make_backward(torch.autograd.backward)

    def close(self) -> None:
        self._batches.close()
        if self._writer is not None:
            self._writer.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps == 0:
            self._record(optimizer, "")
            if self._nudge is not None:  # parameters of no model, which no call has moved
                self._nudge.move(tensor for group in optimizer.param_groups for tensor in group["params"])
        if self._with_gradients and not self.over:
            self._record_gradients(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.over:
            self.steps += 1
            self._batches.step = self.steps + 1
            number = self._names.number(optimizer)
            self._record(optimizer, f"optimizer {number} ({type(optimizer).__name__}) at {user_line()}")
            self._losses.clear()
        if self.steps >= self._wanted:
            self.enough()

    def _record_gradients(self, optimizer: Optimizer) -> None:
        self._names.number(optimizer)
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = (
            (name, _whole(tensor.grad))
            for name, tensor, _ in self._names.tensors()
            if id(tensor) in updated and tensor.grad is not None
        )
        if self._writer is None:
            for _ in gradients:  # gathering a DTensor needs every rank
                pass
        else:
            self._writer.write_gradients(gradients)

    def _record(self, optimizer: Optimizer, by: str) -> None:
        self._names.number(optimizer)
        tensors = ((name, _whole(tensor), kind) for name, tensor, kind in self._names.tensors())
        if self._writer is None:
            for _ in tensors:  # gathering a DTensor needs every rank
                pass
        else:
            self._writer.write(self.steps, by, [float(loss) for loss in self._losses], tensors)

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Tensor) and tensors.numel() == 1 and not isinstance(tensors, BatchTensor):
                self._losses.append(tensors.detach().clone())  # read at the next step: no synchronization here
            return original(tensors, *args, **kwargs)

        return backward


def _whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
