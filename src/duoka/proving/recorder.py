"""Beside the script, in every worker: what each step has made of the models; after so many steps the script ends.

It draws no random number, changes no tensor, and no rank asks another but for tensors that only all ranks together
have (DTensor). Rank 0 writes the states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from duoka.board import Seat
from duoka.proving.batches import Seen
from duoka.proving.naming import Names
from duoka.proving.nudge import Nudge
from duoka.proving.recording import Writer
from duoka.trials.accompany import Companion, Watch
from duoka.view.batch import BatchTensor
from duoka.view.site import user_line


@dataclass(frozen=True)
class Recorder(Companion):
    """Records one run. nudge: None, or the seed by which weights are moved in their last place."""

    nudge: int | None

    def watch(self, seat: Seat) -> _Watch:
        return _Watch(self, seat.rank)


class _Watch(Watch):
    """What one rank has seen of its script so far. Each step of each optimizer counts."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        folder = recorder.places.seen
        super().__init__(folder, rank)
        self._wanted = recorder.steps
        self._writer = Writer(folder, recorder.steps) if rank == 0 else None
        self._seen = Seen(folder, rank, recorder.own_rows)
        self._nudge = None if recorder.nudge is None else Nudge(recorder.nudge)
        self._names = Names()
        self._losses: list[Tensor] = []

    def install(self) -> None:
        """Look at steps, backward passes and batches."""
        if self._nudge is not None:
            self._nudge.install()
        self._seen.install()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        torch.autograd.backward = self._make_backward(torch.autograd.backward)

    def close(self) -> None:
        self._seen.close()
        if self._writer is not None:
            self._writer.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps == 0:
            self._record(optimizer, "")
            if self._nudge is not None:  # those that are in no model, and so were not called
                self._nudge.move(tensor for group in optimizer.param_groups for tensor in group["params"])

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.over:
            self.steps += 1
            self._seen.step = self.steps + 1
            number = self._names.number(optimizer)
            self._record(optimizer, f"optimizer {number} ({type(optimizer).__name__}) at {user_line()}")
            self._losses.clear()
        if self.steps >= self._wanted:
            self.enough()

    def _record(self, optimizer: Optimizer, by: str) -> None:
        self._names.number(optimizer)
        tensors = ((name, _whole(tensor), is_buffer) for name, tensor, is_buffer in self._names.tensors())
        if self._writer is None:
            for _ in tensors:  # of a DTensor every rank gives its part
                pass
        else:
            self._writer.write(self.steps, by, [float(loss) for loss in self._losses], tensors)

    def _make_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Tensor) and tensors.numel() == 1 and not isinstance(tensors, BatchTensor):
                self._losses.append(tensors.detach().clone())  # read at the step: no waiting for a device here
            return original(tensors, *args, **kwargs)

        return backward


def _whole(tensor: Tensor) -> Tensor:
    """A tensor as one device has it."""
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
