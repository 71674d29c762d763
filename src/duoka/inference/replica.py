"""One device's copy of a model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from duoka.errors import AskedError
from duoka.inference import rows
from duoka.inference.calling import Calling
from duoka.inference.sources import Batch
from duoka.private.texts import FAULTS_OF_GPU, NO_MEMORY, says
from duoka.view.tensor.batch import gather_all


class Replica:
    """A model on one device. Computes batches in eval and inference mode, and restores the modes.

    precision: type of autocast; None for none. keep: leave outputs on the device. share_out: converts a tensor with a
    row for each item to a batch tensor, of which each rank computes its rows; None: this process computes all rows.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        calling: Calling,
        precision: torch.dtype | None,
        keep: bool,
        share_out: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.model, self.device, self.calling = model, device, calling
        self.precision, self.keep, self.share_out = precision, keep, share_out
        self.most: int | None = None  # rows that fit into memory at once, after it has run out

    def compute(self, batch: Batch) -> list[Any]:
        """Return the output for each item. When memory runs out, halve the batch, this and later ones."""
        if batch.rows is None:
            return self._outputs(batch.content, None)
        done: list[Any] = []
        while len(done) < batch.rows:
            start = len(done)
            stop = min(batch.rows, start + (self.most or batch.rows))
            try:
                done += self._outputs(rows.partition(batch.content, start, stop, batch.rows), stop - start)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or stop - start == 1:
                    raise
            self.most = (stop - start + 1) // 2
            self._tidy()  # outside `except`, so that the error's frames do not hold memory
        return done

    def _outputs(self, content: Any, count: int | None) -> list[Any]:
        with torch.inference_mode(), evaluating(self.model), self._autocast(), self._current_device():
            output = self.calling(self.model, rows.each_leaf(lambda leaf: self._given(leaf, count), content))
            output = gather_all(output)
            if not self.keep:
                output = rows.each_leaf(_to_cpu, output)
            return rows.split(output, count)

    def _given(self, leaf: Any, count: int | None) -> Any:
        """Return a leaf of a batch as the model gets it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        here = leaf.to(self.device, non_blocking=True)
        return self.share_out(here) if self.share_out and here.shape[:1] == (count,) else here

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, self.precision)

    def _current_device(self) -> AbstractContextManager[Any]:
        """Make this GPU current: kernels of extensions run there, whatever device their arguments are on."""
        return nullcontext() if self.device.type == "cpu" else torch.accelerator.device_index(self.device.index)

    def _tidy(self) -> None:
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


def replicate(model: nn.Module, device: torch.device, share_buffers: bool) -> nn.Module:
    """Copy a model to `device`. Parameters that are there already are shared.

    Args:
        model: not modified.
        device: of the copy.
        share_buffers: the copy may share buffers; False if several copies compute at the same time.

    Raises:
        AskedError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.device != device:
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
        else:
            memo[id(parameter)] = parameter
    for buffer in model.buffers():
        if buffer.device != device or share_buffers:
            memo[id(buffer)] = buffer.detach().to(device)
    try:
        return copy.deepcopy(model, memo).to(device)
    except (RuntimeError, TypeError) as error:
        raise AskedError(f"predict on several devices needs a model that copy.deepcopy can copy: {error}") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode; afterwards restore each module's mode."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_fatal(error: BaseException) -> bool:
    """Return True if the device cannot compute any more in this process after this error."""
    if is_out_of_memory(error):
        return False
    is_fault = isinstance(error, RuntimeError) and says(error, *FAULTS_OF_GPU)
    return is_fault or isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a smaller batch may succeed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or says(error, *NO_MEMORY)


def _to_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
