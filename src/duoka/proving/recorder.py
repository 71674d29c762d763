"""Beside the script, in every worker: what each step has made of the models; after so many steps the script ends.

It draws no random number, changes no tensor, and no rank asks another but for tensors that only all ranks together
have (DTensor). Rank 0 writes the states.
"""

from __future__ import annotations

import _thread  # a thread of the threading module would be waited for
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from duoka import environment
from duoka.origins.forked import Forked
from duoka.process import this_process
from duoka.proving.batches import Seen
from duoka.proving.naming import Names
from duoka.proving.nudge import Nudge
from duoka.proving.recording import Writer
from duoka.proving.redirecting import redirect
from duoka.proving.scratch import Scratch
from duoka.view.batch import BatchTensor
from duoka.view.site import user_line

TO_LEAVE = 10.0  # seconds for threads and atexit functions of a script that was ended


class Enough(BaseException):
    """All steps that are wanted were made. No `except Exception` of a script's catches it."""


@dataclass(frozen=True)
class Recorder:
    """Records one run (`duoka.worker.Observer`). A worker is forked with it.

    folder: where to. scratch: where to the script's own writing goes. sockets: where multiprocessing keeps its own,
    whose paths must be short. steps: how many are recorded. seed: of all
    generators, which the script may seed again. own_rows: ranks are the script's own, and so are their batches.
    nudge: None, or the seed by which weights are moved in their last place.
    """

    folder: Path
    scratch: Path
    sockets: Path
    steps: int
    seed: int
    own_rows: bool
    nudge: int | None

    def begin(self, rank: int) -> None:
        """What the script writes from now on goes to the scratch folder."""
        environment.keep_trackers_quiet()
        multiprocessing.current_process()._config["tempdir"] = str(self.sockets)  # type: ignore[attr-defined]
        redirect(Scratch(self.scratch))

    @contextmanager
    def around(self, rank: int) -> Iterator[None]:
        """Record what the script does within, and end it when it has made enough steps."""
        self._seed(rank)
        watch = _Watch(self, rank)
        watch.install()
        try:
            yield
        except Enough:
            _thread.start_new_thread(_leave_at_last, ())
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        watch.end()

    def _seed(self, rank: int) -> None:
        seed = self.seed + rank if self.own_rows else self.seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        process = this_process()
        if isinstance(process.origin, Forked):
            process.origin = replace(process.origin, asked=replace(process.origin.asked, seed=seed))


def _leave_at_last() -> None:
    time.sleep(TO_LEAVE)
    os._exit(0)


class _Watch:
    """What one rank has seen of its script so far."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._wanted, self._is_first = recorder.steps, rank == 0
        self._writer = Writer(recorder.folder, recorder.steps) if self._is_first else None
        self._seen = Seen(recorder.folder, rank, recorder.own_rows)
        self._nudge = None if recorder.nudge is None else Nudge(recorder.nudge)
        self._names = Names()
        self._losses: list[Tensor] = []
        self._steps, self._over = 0, False

    def install(self) -> None:
        """Look at steps, backward passes and batches."""
        if self._nudge is not None:
            self._nudge.install()
        self._seen.install()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        torch.autograd.backward = self._make_backward(torch.autograd.backward)

    def end(self) -> None:
        """The script has ended well, or was ended."""
        self._seen.close()
        if self._writer is not None and not self._over:
            self._writer.end(self._steps, enough=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._steps == 0:
            self._record(optimizer, "")
            if self._nudge is not None:  # those that are in no model, and so were not called
                self._nudge.move(tensor for group in optimizer.param_groups for tensor in group["params"])

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._over:
            self._steps += 1
            self._seen.step = self._steps + 1
            number = self._names.number(optimizer)
            self._record(optimizer, f"optimizer {number} ({type(optimizer).__name__}) at {user_line()}")
            self._losses.clear()
        if self._steps >= self._wanted:
            self._enough()

    def _record(self, optimizer: Optimizer, by: str) -> None:
        self._names.number(optimizer)
        tensors = ((name, _whole(tensor), is_buffer) for name, tensor, is_buffer in self._names.tensors())
        if self._writer is None:
            for _ in tensors:  # of a DTensor every rank gives its part
                pass
        else:
            self._writer.write(self._steps, by, [float(loss) for loss in self._losses], tensors)

    def _enough(self) -> None:
        if self._over:
            os._exit(0)  # the script caught it, and went on; all that is wanted is written
        self._over = True
        self._seen.close()
        if self._writer is not None:
            self._writer.end(self._steps, enough=True)
        raise Enough

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
